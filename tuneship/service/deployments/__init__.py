"""Handlers of deployments, their logs and metrics, and the reconciler that makes reality match the rows."""
