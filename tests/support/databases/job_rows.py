"""Rows of jobs that wait, for tests of the queue that need no service."""

import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from tuneship.contract.jobs import JobStatus

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def queued_job(job_id: str = "ft_1", **values: Any) -> dict[str, Any]:
    """Make the row of a job of Alice, with some columns changed."""
    row: dict[str, Any] = {
        "id": job_id, "client_id": "alice", "created_at": NOW, "updated_at": NOW, "tags": {},
        "base_model": "b", "dataset_id": "ds_1", "fine_tuning_method": "lora", "model_name": "m",
        "status": JobStatus.QUEUED, "hyperparameters": {}, "validation_frequency": 0.1,
        "compute_config": {}, "security_settings": {},
    }  # fmt: skip
    return row | values


def long_queue(jobs: int, tenants: int) -> Iterator[dict[str, Any]]:
    """Make the rows of many jobs in the order in which they came; some tenants have many of them, some have few."""
    dice = random.Random(1)  # noqa: S311 - no secret
    for number in range(jobs):
        tenant = number if number < tenants else int(tenants * dice.random() ** 2)
        came = NOW + timedelta(milliseconds=number)
        yield queued_job(f"ft_{number:06}", client_id=f"tenant{tenant:03}", created_at=came)
