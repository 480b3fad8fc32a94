"""Prefect tasks of the pipeline: one task is one API operation with its retry policy, run name and idempotency key.

`tuneship.prefect.tasks.task_of` makes them from declared operations; written here are those that do more, such as
creates that happen once for a release. The waits are in `tuneship.prefect.waits`.
"""
