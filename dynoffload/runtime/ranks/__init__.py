"""Several processes: replicas and shards of a model, what each process tells the others of itself,
what is said when one is lost, and the cores of each."""
