"""Reads and writes of one kind of row each."""
