"""What the operator offers: base models and instance types, read from files at startup."""
