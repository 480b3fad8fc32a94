"""The span of a training job, from its first attempt to its end."""

import logging

from tuneship.service.telemetry.tracing import NANOSECONDS, EndedSpan, Tracing
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database

logger = logging.getLogger(__name__)


def record_job(tracing: Tracing | None, database: Database, job_id: str, error: str = "") -> None:
    """Send the span of a job whose end is committed; `error` is a code of the service."""
    if tracing is None:
        return
    try:
        with database.read() as connection:
            job = rows.fetch(connection, tables.jobs, job_id, client_id=None)
    except Exception:  # the job has ended, whether or not its span can be made
        logger.exception("the span of a job could not be made: %s", job_id)
        return
    if job is None or job["started_at"] is None:
        return
    end = job["completed_at"] or job["updated_at"]
    tracing.record(
        EndedSpan(
            name=f"fine_tuning {job['base_model']}",
            start_ns=int(job["started_at"].timestamp() * NANOSECONDS),
            end_ns=int(end.timestamp() * NANOSECONDS),
            attributes={
                "gen_ai.provider.name": "tuneship",
                "gen_ai.request.model": job["base_model"],
                "tuneship.job_id": job["id"],
                "tuneship.job.status": str(job["status"]),
                "tuneship.job.attempts": job["attempt"],
                "tuneship.job.steps": job["current_step"],
                "tuneship.job.epochs": job["current_epoch"],
            },
            error=error,
        )
    )
