"""Readings of what a service publishes: counts by bucket and deployment."""
