"""One job: how far it is, its losses, its log, and what it is made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from tuneship.contract.common import JobId
from tuneship.contract.jobs import ENDED, Job, JobSummary, get_job_logs, get_job_metrics
from tuneship.contract.reports.job_reports import JobLogEntry, JobMetrics
from tuneship.service.console.chart_series import smoothed, thinned
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

LOG_LINES = 200
LOG_PAGE = 1000
OTHERS_LISTED = 50


@dataclass(frozen=True)
class JobView:
    """A job, with what its metrics and its log say, where this session may read them."""

    job: Job
    has_ended: bool
    # Whether the session may read metrics, and the log.
    shows_metrics: bool
    shows_log: bool
    best: tuple[int, float] | None
    # The share of the first validation loss that is gone.
    fallen: float | None
    steps: JobMetrics | None
    # Each step at which the model was measured, with its validation loss.
    losses: list[tuple[int, float]]
    log: list[JobLogEntry]
    # The newest other jobs of the same base model, and the one beside which it is shown, with its losses.
    others: list[JobSummary]
    other: Job | None
    other_losses: list[tuple[int, float]]

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """Those of the job; where another one stands beside it, what differs comes first, with both values."""
        own = self.job.hyperparameters
        if self.other is None:
            return own
        theirs = self.other.hyperparameters
        names = {*own, *theirs}
        different = {name for name in names if own.get(name) != theirs.get(name)}
        return {
            name: f"{own.get(name, 'unset')}, there {theirs.get(name, 'unset')}"
            if name in different
            else own[name]
            for name in sorted(names, key=lambda name: (name not in different, name))
        }

    @cached_property
    def chart(self) -> dict[str, Any] | None:
        """The data of the loss curve, made where the page is: thousands of steps take milliseconds."""
        if self.steps is None or not self.steps.steps:
            return None
        chart = _chart(self.job, self.steps, dict(self.losses), dict(self.other_losses))
        return chart if self.other is None else {**chart, "other": self.other.model_name}

    def took(self, now: datetime) -> timedelta | None:
        """How long it has trained."""
        return (
            None
            if self.job.started_at is None
            else (self.job.completed_at or now) - self.job.started_at
        )

    def left(self, now: datetime) -> timedelta | None:
        """How long it will still train."""
        end = self.job.estimated_completion_at
        return None if end is None else max(end - now, timedelta())


@page("/console/jobs/{job_id}")
async def job(
    client: PageClient,
    job_id: JobId,
    with_: Annotated[JobId | None, Field(alias="with")] = None,
) -> JobView:
    """Leave out what the session may not read."""
    found = await client.jobs.get(job_id)
    steps = measured = None
    if client.may(get_job_metrics):
        steps = await client.jobs.metrics(job_id)
        measured = await client.jobs.metrics(job_id, evaluated_only=True)
    losses = [] if measured is None else _known(measured.steps, measured.validation_loss)
    other = None if with_ is None else await client.jobs.get(with_)
    beside = None
    if other is not None and client.may(get_job_metrics):
        beside = await client.jobs.metrics(other.id, evaluated_only=True)
    listed = await client.jobs.list(limit=OTHERS_LISTED, base_model=found.base_model)
    best = min(losses, key=lambda one: one[1], default=None)
    first = losses[0][1] if losses else 0.0
    return JobView(
        job=found,
        has_ended=found.status in ENDED,
        shows_metrics=steps is not None,
        shows_log=client.may(get_job_logs),
        best=best,
        fallen=None if best is None or first <= 0 else 1 - best[1] / first,
        steps=steps,
        losses=losses,
        log=await _newest_lines(client, job_id) if client.may(get_job_logs) else [],
        others=[one for one in listed.jobs if one.id != job_id],
        other=other,
        other_losses=[] if beside is None else _known(beside.steps, beside.validation_loss),
    )


async def _newest_lines(client: PageClient, job_id: str) -> list[JobLogEntry]:
    # The operation answers the oldest first.
    lines: list[JobLogEntry] = []
    after: str | None = None
    while True:
        found = await client.jobs.logs(job_id, limit=LOG_PAGE, after=after)
        lines = [*lines, *found.logs][-LOG_LINES:]
        if len(found.logs) < LOG_PAGE:
            return lines
        after = found.pagination.after


def _known(steps: Sequence[int], values: Sequence[float | None]) -> list[tuple[int, float]]:
    return [(step, one) for step, one in zip(steps, values, strict=True) if one is not None]


def _chart(
    job: Job, metrics: JobMetrics, measured: Mapping[int, float], beside: Mapping[int, float]
) -> dict[str, Any]:
    """The losses by step: raw and smoothed in training, where the model was measured, and those of another job."""
    known = _known(metrics.steps, metrics.training_loss)
    raw = [loss for _, loss in known]
    columns = thinned([[step for step, _ in known], raw, smoothed(raw)])
    by_step = {step: (one, mean) for step, one, mean in zip(*columns, strict=True)}
    steps = sorted({*by_step, *measured, *beside})
    return {
        "kind": "loss",
        "total": max([job.total_steps, *beside]),
        "columns": [
            steps,
            [by_step.get(step, (None, None))[0] for step in steps],
            [by_step.get(step, (None, None))[1] for step in steps],
            [measured.get(step) for step in steps],
            *([[beside.get(step) for step in steps]] if beside else []),
        ],
    }
