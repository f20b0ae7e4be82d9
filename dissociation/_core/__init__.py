"""Hold what all folders stand on: checks, keys, linear algebra, files and named results."""
