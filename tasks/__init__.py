"""Prefect tasks: one task is one API operation with its retry policy, run name and idempotency key."""
