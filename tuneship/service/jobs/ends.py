"""How an attempt or a job ends, as rows: each method is one transaction under the job's lease, then a wake-up.

All of them raise `LeaseLost` where the job is not this attempt's any more, and change nothing then.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from tuneship.contract.jobs import JobStatus
from tuneship.service.access.data_keys import Keyring
from tuneship.service.context.notifier import Notifier
from tuneship.service.jobs import record_progress
from tuneship.service.jobs.attempts import SEALED_KINDS
from tuneship.service.jobs.span import record_job
from tuneship.service.models.lookup import model_id
from tuneship.service.telemetry.tracing import Tracing
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.rows import Row
from tuneship.store.records import job_leases, job_records
from tuneship.store.records.job_leases import JobLease


@dataclass(frozen=True)
class JobEnds:
    """Ends attempts and jobs."""

    database: Database
    keyring: Keyring
    notifier: Notifier
    clock: Callable[[], datetime]
    tracing: Tracing | None

    def complete(
        self,
        claim: JobLease,
        job: Row,
        completed: Mapping[str, Any],
        digests: Mapping[str, str],
    ) -> None:
        """Register the model whose files were stored.

        `completed`: the progress line; `digests`: SHA-256 by file name.
        """
        now, identifier = self.clock(), model_id(job["base_model"], job["model_name"], job["id"])
        blob = model_key(job)
        with self.database.write(claim.client_id) as connection:
            ends_learnt = completed["ends_learnt"]
            result = {
                "fine_tuned_model": identifier,
                "validation_loss": completed["validation_loss"],
                "ends_learnt": ends_learnt,
            }
            job_leases.end(
                connection,
                claim,
                JobStatus.COMPLETED,
                now,
                completed_at=now,
                checkpoint=None,
                **result,
            )
            model = {
                "id": identifier,
                "client_id": job["client_id"],
                "created_at": now,
                "updated_at": now,
                "tags": job["tags"],
                "base_model": job["base_model"],
                "name": job["model_name"],
                "job_id": job["id"],
                "fine_tuning_method": job["fine_tuning_method"],
                "blob": blob,
                "sha256": dict(digests),
                "ends_learnt": ends_learnt,
                "appended_end": completed["appended_end"],
            }
            rows.insert(connection, tables.models, model)
            # From now on the key of the adapter has the name of its files.
            self.keyring.rename(connection, job["client_id"], f"models/{job['id']}", blob, now)
            self.keyring.destroy(connection, f"jobs/{job['id']}")
            text = f"completed; the model is the state after step {completed['best_step']}"
            job_records.add_log(connection, job["id"], now, "info", text)
            record_progress.emit_event(
                connection, job["id"], "succeeded", now, fine_tuned_model=identifier
            )
        self.notifier.notify(job["id"])
        record_job(self.tracing, self.database, job["id"])

    def fail(self, claim: JobLease, reason: str, message: str) -> None:
        """End the job with an error."""
        now, job_id = self.clock(), claim.job_id
        error = {"code": "fine_tuning_error", "reason": reason, "message": message}
        with self.database.write(claim.client_id) as connection:
            job_leases.end(connection, claim, JobStatus.FAILED, now, error=error, checkpoint=None)
            self._destroy_keys(connection, job_id)
            job_records.add_log(connection, job_id, now, "error", f"{reason}: {message}")
            record_progress.emit_event(connection, job_id, "failed", now, reason=reason)
        self.notifier.notify(job_id)
        record_job(self.tracing, self.database, job_id, error=reason)

    def cancel(self, claim: JobLease) -> None:
        """End a job that is to be cancelled and has no process."""
        now, job_id = self.clock(), claim.job_id
        with self.database.write(claim.client_id) as connection:
            ended = {"status": JobStatus.CANCELLED, "lease_until": None, "checkpoint": None}
            job_leases.write(connection, claim, updated_at=now, **ended)
            self._destroy_keys(connection, job_id)
            job_records.add_log(connection, job_id, now, "info", "cancelled")
            record_progress.emit_event(connection, job_id, "cancelled", now)
        self.notifier.notify(job_id)
        record_job(self.tracing, self.database, job_id)

    def requeue(self, claim: JobLease, attempts_without_progress: int, text: str) -> None:
        """Give the job back to the queue for another attempt; `text` goes to its log."""
        now = self.clock()
        with self.database.write(claim.client_id) as connection:
            kept = {"owner": None, "attempts_without_progress": attempts_without_progress}
            job_leases.end(connection, claim, JobStatus.QUEUED, now, **kept)
            job_records.add_log(connection, claim.job_id, now, "warning", text)
        self.notifier.notify(claim.job_id)

    def _destroy_keys(self, connection: sa.Connection, job_id: str) -> None:
        """Make checkpoints and adapter of a job without a model unreadable."""
        self.keyring.destroy(connection, *(f"{kind}/{job_id}" for kind in SEALED_KINDS))


def model_key(job: Row) -> str:
    """The key under which an attempt stores the files of its model, also the name of their data key from then on.

    Each attempt has its own: one that stood still while it stored cannot touch the files of the next.
    """
    return f"models/{job['id']}-{job['attempt']}"
