"""Metrics of the service for Prometheus."""
