"""Answers requests that nobody waits for, after all other requests; it knows neither what sends them nor files."""
