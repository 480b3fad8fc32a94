"""The parts of `flows/guard.py`."""
