"""Restricts worker processes: Landlock, seccomp and namespaces."""
