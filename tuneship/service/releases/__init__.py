"""Releases: what pipelines record about them, and the answers of people."""
