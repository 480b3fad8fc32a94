"""Prefect tasks: one task is one API operation with its retry policy, run name and idempotency key.

`factory.py` makes them from declared operations; the other files hold those that do more.
"""
