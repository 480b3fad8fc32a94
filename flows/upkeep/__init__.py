"""What `flows/guard.py` is made of."""
