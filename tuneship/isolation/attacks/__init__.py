"""Ways out of a worker process, which must all be closed."""
