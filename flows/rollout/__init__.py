"""What `flows/shift_traffic.py` is made of: the record's file, the look, the split, the way back, the page."""
