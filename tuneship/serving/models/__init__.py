"""The architectures that the engine runs, and their layers."""
