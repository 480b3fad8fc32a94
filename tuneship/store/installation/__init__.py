"""A data directory as a whole: its owner, backup and restore."""
