"""Answers of handlers, independent of how they are sent: refusals, streams, downloads, long JSON."""
