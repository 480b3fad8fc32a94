"""Handlers of generation, and one generation from the request to the recorded answer."""
