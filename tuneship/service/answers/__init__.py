"""Answers of handlers, whatever sends them: refusals, streams, downloads, long JSON."""
