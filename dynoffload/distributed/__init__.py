"""Several processes: replicas and shards of a model, and the watchdog that notices a lost rank."""
