"""Several processes: what each tells the others of itself, and what is said when one is lost."""
