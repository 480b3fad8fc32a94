"""Stores the answers of a batch: in sealed parts while it runs, and in an output and an error file at its end.

Each part is stored in one transaction with the numbers of the batch, which say from where a restarted service goes on.
So an answer is either stored and counted, or its request is sent again. Called from threads.
"""

import shutil
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate
from typing import Any, BinaryIO

import sqlalchemy as sa

from tuneship.contract.openai.batches import BatchError, BatchStatus
from tuneship.host.disk_space import check_room
from tuneship.service.access.data_keys import Keyring
from tuneship.service.background_requests.answering import BackgroundAnswer
from tuneship.service.context.quotas import room_left
from tuneship.service.context.uploaded_files import remove_unless_stored
from tuneship.service.openai.batch_files import insert_file, new_file, object_of, open_batch_file
from tuneship.settings import ServiceSettings
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.tables import BatchFileRow, BatchRow
from tuneship.store.files.blobs import Blobs, StagedFile
from tuneship.store.records import batch_records
from tuneship.store.records.batch_records import ANSWERS_PART, ERRORS_PART, OUTPUT
from tuneship.store.records.outbox import emit

COPIED_BYTES = 1 << 20
# The names of the two files, behind the id of their batch.
NAMES = {ANSWERS_PART: "output.jsonl", ERRORS_PART: "error.jsonl"}
COLUMNS = {ANSWERS_PART: "output_file_id", ERRORS_PART: "error_file_id"}


# Rows of files that are not inserted yet, with their content.
NewFiles = list[tuple[dict[str, Any], StagedFile]]


class BatchLost(Exception):
    """Another worker has changed the batch: the current one must stop and read the row again."""


@dataclass(eq=False)
class OverQuota(Exception):
    """The tenant's quota of bytes is used up; `batch` is the row with the answers stored so far."""

    batch: BatchRow


KEY_ENDED = BatchError(
    code="key_ended",
    message="The API key that made this batch was revoked or has expired. What was answered is kept.",
)


@dataclass(frozen=True)
class BatchStore:
    """The answers and states of batches. Its methods may take long."""

    settings: ServiceSettings
    database: Database
    blobs: Blobs
    keyring: Keyring
    clock: Callable[[], datetime]

    def open(self, row: BatchFileRow) -> BinaryIO:
        """Open the plain bytes of a batch's file. Raises `OSError` and `BlobsAway`."""
        return open_batch_file(self.database, self.keyring, self.blobs, row)

    def store(self, batch: BatchRow, answers: Sequence[BackgroundAnswer]) -> BatchRow:
        """Store the next answers of a batch, in the order of its requests; returns its row.

        Raises `BatchLost`; `OverQuota`, after those that still fit were stored; and `DiskNearlyFull`, which passes.
        """
        with self.database.read() as connection:
            left = room_left(self.settings, connection, batch["client_id"])
            stored = batch_records.bytes_of_parts(connection, batch["id"])
        ends = accumulate(len(one.content) for one in answers)
        fitting = answers[: sum(end <= left for end in ends)]
        # At its end the parts lie beside the files that they are joined to.
        check_room(self.settings, stored + 2 * sum(len(one.content) for one in fitting))
        if fitting:
            batch = self._store_fitting(batch, fitting)
        if len(fitting) < len(answers):
            raise OverQuota(batch)
        return batch

    def _store_fitting(self, batch: BatchRow, answers: Sequence[BackgroundAnswer]) -> BatchRow:
        now = self.clock()
        changes = _counted(batch, answers)
        position = batch["completed"] + batch["failed"]
        with ExitStack() as staging:
            files: NewFiles = []
            for purpose, is_success in ((ANSWERS_PART, True), (ERRORS_PART, False)):
                lines = [one.content for one in answers if one.is_success is is_success]
                if lines:
                    row = new_file(batch["client_id"], NAMES[purpose], purpose, now)
                    row |= {"batch_id": batch["id"], "position": position}
                    staged = staging.enter_context(self.blobs.staged())
                    staged.write(b"".join(lines))
                    files.append((row, staged))
            with self._kept(files), self.database.write(batch["client_id"]) as connection:
                if not batch_records.advance(connection, batch, now, changes):
                    raise BatchLost(batch["id"])
                for row, staged in files:
                    insert_file(self.keyring, connection, row, staged)
                if room_left(self.settings, connection, batch["client_id"]) < 0:
                    raise OverQuota(batch)  # something else has taken the room meanwhile
                return _row(connection, batch["id"])

    def change_state(
        self, batch: BatchRow, before: Sequence[BatchStatus], **values: Any
    ) -> BatchRow:
        """Change a batch that is in one of these states, and return its row. Raises `BatchLost`."""
        with self.database.write(batch["client_id"]) as connection:
            if not batch_records.move(connection, batch["id"], before, self.clock(), **values):
                raise BatchLost(batch["id"])
            return _row(connection, batch["id"])

    def cancel_for_its_key(self, batch: BatchRow) -> None:
        """Cancel a batch whose key has ended, as its owner could. Raises `BatchLost`."""
        self.change_state(
            batch,
            [BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS],
            status=BatchStatus.CANCELLING,
            cancelling_at=self.clock(),
            errors=[KEY_ENDED.model_dump()],
        )

    def end(
        self,
        batch: BatchRow,
        status: BatchStatus,
        before: Sequence[BatchStatus],
        errors: Sequence[BatchError],
        *,
        has_files: bool = True,
    ) -> None:
        """Join the parts of a batch to its files, and end it with an event. Raises `BatchLost` and `DiskNearlyFull`.

        With `has_files=False` the stored answers are deleted and no file is made.
        """
        now = self.clock()
        values: dict[str, Any] = {"status": status, f"{status}_at": now}
        if errors:
            values["errors"] = [one.model_dump() for one in errors]
        with self.database.read() as connection:
            found = batch_records.parts_of(connection, batch["id"])
        if found and has_files:
            check_room(self.settings, sum(part["bytes"] for part in found))
        with ExitStack() as staging:
            files: NewFiles = []
            for purpose, name in NAMES.items():
                of_purpose = [part for part in found if part["purpose"] == purpose]
                if of_purpose and has_files:
                    row = new_file(batch["client_id"], f"{batch['id']}_{name}", OUTPUT, now)
                    row |= {
                        "batch_id": batch["id"],
                        "security_settings": batch["security_settings"],
                    }
                    staged = staging.enter_context(self.blobs.staged())
                    for part in of_purpose:
                        with self.open(part) as source:
                            shutil.copyfileobj(source, staged, COPIED_BYTES)
                    files.append((row, staged))
                    values[COLUMNS[purpose]] = row["id"]
            with self._kept(files), self.database.write(batch["client_id"]) as connection:
                if not batch_records.move(connection, batch["id"], before, now, **values):
                    raise BatchLost(batch["id"])
                for row, staged in files:
                    insert_file(self.keyring, connection, row, staged)
                batch_records.remove_parts(connection, batch["id"])
                self.keyring.destroy(connection, *(object_of(part["id"]) for part in found))
                numbers = {name: batch[name] for name in ("total", "completed", "failed")}
                emit(connection, f"batch.{status}", _row(connection, batch["id"]), now, **numbers)
        for part in found:
            # A blob that stays, e.g. after a kill, has neither row nor key, and is set aside later.
            self.blobs.delete(object_of(part["id"]))

    @contextmanager
    def _kept(self, files: NewFiles) -> Generator[None]:
        """Store blobs before the transaction in the block, and remove them again if it fails."""
        try:
            for row, staged in files:
                self.blobs.keep(staged, row["blob"])
            yield
        except Exception:
            # What cannot be removed now is set aside later, as after a kill.
            for row, _ in files:
                with suppress(Exception):
                    remove_unless_stored(self.database, self.blobs, tables.batch_files, row)
            raise


def _counted(batch: BatchRow, answers: Sequence[BackgroundAnswer]) -> dict[str, Any]:
    """The counts of a batch with more answers, and the safeguards of the resources that answered."""
    succeeded = sum(one.is_success for one in answers)
    safeguards = dict(batch["security_settings"])
    safeguards["audit_logging"] |= any(one.has_audit for one in answers)
    if any(one.is_hipaa for one in answers):
        safeguards["compliance_mode"] = "hipaa"
    first = next((one.model for one in answers if one.model is not None), None)
    return {
        "completed": batch["completed"] + succeeded,
        "failed": batch["failed"] + len(answers) - succeeded,
        "prompt_tokens": batch["prompt_tokens"] + sum(one.prompt_tokens for one in answers),
        "completion_tokens": batch["completion_tokens"]
        + sum(one.completion_tokens for one in answers),
        "model": batch["model"] or first,
        "security_settings": safeguards,
    }


def _row(connection: sa.Connection, batch_id: str) -> BatchRow:
    row = rows.fetch(connection, tables.batches, batch_id, client_id=None)
    if row is None:
        raise BatchLost(batch_id)
    return row
