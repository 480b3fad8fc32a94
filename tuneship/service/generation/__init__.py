"""Generation from the request to the recorded answer."""
