"""The operator's catalogues of base models and instance types, read from files at startup."""
