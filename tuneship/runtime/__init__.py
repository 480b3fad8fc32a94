"""Starts, isolates, watches and ends the processes of workers and replicas."""
