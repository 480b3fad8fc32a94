"""A data directory as a whole: who owns it, backup and restore."""
