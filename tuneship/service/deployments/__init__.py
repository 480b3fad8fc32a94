"""Handlers of deployments, their logs and metrics, and the keeper that makes reality match the rows."""
