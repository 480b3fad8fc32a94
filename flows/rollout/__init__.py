"""The parts of `flows/shift_traffic.py`: the record's file, the look, the split, the rollback, the page."""
