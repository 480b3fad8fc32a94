"""Reads from the service what is tracked about a job: its record, its curves, and the digests of its datasets."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from tuneship.client import ApiError, Client
from tuneship.contract.datasets import CONTENT_TAG
from tuneship.contract.jobs import ENDED, JobMetrics
from tuneship.tracking.tracked_run import TrackedDataset, TrackedRun, Value

CURVES = ("training_loss", "validation_loss", "learning_rate", "accuracy", "perplexity")
MEASURED_AT_EVALUATIONS = ("validation_loss", "accuracy", "perplexity")


class JobNotEnded(Exception):
    """The job still runs or waits, so its curves are not complete."""


def run_of_job(client: Client, job_id: str) -> TrackedRun:
    """The run of a job that has ended, without its release. Raises `JobNotEnded` and errors of the client."""
    job = client.jobs.get(job_id)
    if job.status not in ENDED:
        raise JobNotEnded(f"job {job.id} is {job.status}: only a job that has ended is tracked")
    # As the service resolved them. Tags are left out, since people write them.
    parameters = {
        "base_model": job.base_model,
        "fine_tuning_method": job.fine_tuning_method,
        "validation_frequency": job.validation_frequency,
        "hyperparameters": job.hyperparameters,
        "compute_config": job.compute_config,
    }
    return TrackedRun(
        job_id=job.id,
        model_name=job.model_name,
        status=job.status,
        model=job.fine_tuned_model,
        parameters=dict(_flat(parameters)),
        curves=_curves(client.jobs.metrics(job_id)),
        datasets=[
            *_datasets(client, job.dataset_id, "training"),
            *_datasets(client, job.validation_dataset_id, "validation"),
        ],
        started_at=job.started_at or job.created_at,
        ended_at=job.completed_at or job.updated_at,
    )


def _flat(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Value]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool | int | float | str):
            yield f"{prefix}{name}", value
        elif isinstance(value, Sequence):
            yield f"{prefix}{name}", ", ".join(map(str, value))


def _curves(metrics: JobMetrics) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for name in CURVES:
        values: list[float | None] = getattr(metrics, name)
        points = [
            (step, value)
            for step, value, before in zip(metrics.steps, values, [None, *values], strict=False)
            # A step without an evaluation repeats the last one.
            if value is not None
            and math.isfinite(value)
            and not (name in MEASURED_AT_EVALUATIONS and value == before)
        ]
        if points:
            curves[name] = points
    return curves


def _datasets(
    client: Client, dataset_id: str | None, context: Literal["training", "validation"]
) -> list[TrackedDataset]:
    """The parts of a dataset that a merge made, in order; any other dataset alone. Empty where it is gone."""
    if dataset_id is None:
        return []
    try:
        dataset = client.datasets.get(dataset_id)
    except ApiError as error:
        if error.status != 404:
            raise
        return []
    if dataset.source_datasets:
        parts = [_datasets(client, one, context) for one in dataset.source_datasets]
        # Parts may be deleted after a merge; then the whole stands for them.
        if all(parts):
            return list({one.id: one for part in parts for one in part}.values())
    digest = dataset.tags.get(CONTENT_TAG, dataset.id)
    return [
        TrackedDataset(id=dataset.id, digest=digest, examples=dataset.num_examples, context=context)
    ]
