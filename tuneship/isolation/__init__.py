"""What a worker process may not do: Landlock, seccomp and namespaces."""
