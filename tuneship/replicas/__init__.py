"""Processes that serve a model, as groups that answer requests."""
