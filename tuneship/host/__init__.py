"""The host: memory, cores, GPUs, open files, disk space, threads, and files that survive a power failure."""
