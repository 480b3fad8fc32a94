"""Checks big datasets after their upload was answered: `processing` becomes `processed` or `failed`.

One file at a time, in a thread, and the tenants take turns; the supervisor runs it. It keeps no state that matters:
after a kill the file of a row in `processing` is read from its start again, and the outcome is written once, with its
event. A dataset that cannot be processed is tried a few times, then it is `failed`. Next: `reading.py`.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from tuneship.contract.datasets import DatasetStatus
from tuneship.host.thread_pools import Threads
from tuneship.host.ticks import Ticks
from tuneship.security.sealed_files import open_plain
from tuneship.service.access.data_keys import Keyring
from tuneship.service.background.background_retries import BackgroundRetries
from tuneship.service.catalogues.base_models import Catalogue, CatalogueFault
from tuneship.service.datasets.advice import suggestions
from tuneship.service.datasets.lookup import object_of
from tuneship.service.datasets.new_datasets import announce, counts, verdict
from tuneship.service.datasets.reading import DatasetReading, Plan, ReadingStopped, read_dataset
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.tables import DatasetRow
from tuneship.store.files.blobs import Blobs
from tuneship.store.files.stored_files import dataset_file
from tuneship.store.records import dataset_records
from tuneship.store.records.outbox import emit

logger = logging.getLogger(__name__)


class DatasetProcessing:
    """The loop over rows in `processing`."""

    def __init__(
        self,
        *,
        database: Database,
        blobs: Blobs,
        keyring: Keyring,
        catalogue: Catalogue,
        clock: Callable[[], datetime],
    ) -> None:
        """Begin with no dataset tried."""
        self._database, self._blobs, self._keyring = database, blobs, keyring
        self._catalogue, self._clock = catalogue, clock
        self._ticks = Ticks(tick_s=0.0)
        self._stopped = threading.Event()
        self._retries = BackgroundRetries(clock)
        # The tenants that have had their turn, the last one at the end.
        self._served: list[str] = []
        self.threads = Threads("dataset processing", 1)

    async def run(self) -> None:
        """Process datasets until cancelled; the file that is being read is then read again at the next start."""
        self._stopped.clear()
        try:
            with self._database.listening(self._ticks.wake):
                await self._ticks.repeat(lambda: self.threads.run(self._process_next))
        finally:
            self._stopped.set()

    def _process_next(self) -> bool:
        """Process one tenant's oldest dataset, with tenants in turns; return whether to continue at once."""
        try:
            with self._database.read() as connection:
                waiting = dataset_records.to_process(connection)
                self._retries.keep_only(waiting)
                due = self._next(
                    [one for one in waiting if not self._retries.is_waiting(one)], waiting
                )
                row = rows.fetch(connection, tables.datasets, due, client_id=None) if due else None
        except Exception:  # the database is away: the next look tries again
            logger.exception("datasets could not be looked for")
            return False
        if row is None:
            return False
        try:
            self._process(row)
        except ReadingStopped:
            return False
        except Exception as error:  # the loop must outlive any single failure, e.g. a full disk
            logger.exception("a dataset could not be processed: %s", row["id"])
            self._retries.add(row["id"], error)
        return True

    def _next(self, due: Sequence[str], clients: Mapping[str, str]) -> str:
        """The oldest due dataset of the tenant whose last turn was longest ago; empty if none is due."""
        last = {client: turn for turn, client in enumerate(self._served, 1)}
        chosen = min(due, key=lambda one: last.get(clients[one], 0), default="")
        if chosen:
            others = set(clients.values()) - {clients[chosen]}
            self._served = [one for one in self._served if one in others] + [clients[chosen]]
        return chosen

    def _process(self, row: DatasetRow) -> None:
        given_up = self._retries.given_up(row["id"])
        if given_up is not None:
            text = f"the dataset could not be processed: {given_up}"
            self._end(row, _failure("internal_error", text))
            return
        try:
            reading = self._read(row)
        except CatalogueFault as fault:
            text = f"the files of the base model that counts tokens cannot be used: {fault}"
            self._end(row, _failure("internal_error", text))
            return
        except FileNotFoundError:
            logger.exception("the file of a dataset is missing: %s", row["id"])
            self._end(row, _failure("internal_error", "the stored file is missing"))
            return
        if reading.error_count:
            details = [one.model_dump() for one in reading.errors]
            self._end(row, _failure("dataset_error", verdict(reading), details))
        else:
            values: dict[str, Any] = {"status": DatasetStatus.PROCESSED}
            if not row["num_examples"]:
                values |= counts(reading)
            if row["source_datasets"]:
                values["duplicate_examples"] = reading.codes["duplicate_example"]
            else:
                values["suggestions"] = suggestions(reading) or None
            self._end(row, values)

    def _read(self, row: DatasetRow) -> DatasetReading:
        # A merged dataset may have its counts from its sources: then only repetitions are counted.
        catalogue = self._catalogue
        base = None if row["num_examples"] else catalogue.get(row["tokenizer"]) or catalogue.default
        plan = Plan(row["format"], base, self._stopped.is_set)
        with self._database.read() as connection:
            key = self._keyring.find(connection, row["client_id"], object_of(row))
        with (
            dataset_file(self._blobs, row) as path,
            open_plain(path, key) as file,
        ):
            return read_dataset(file, row["bytes"], plan)

    def _end(self, row: DatasetRow, values: dict[str, Any]) -> None:
        """Write the outcome with its event, unless the dataset was deleted meanwhile."""
        now = self._clock()
        with self._database.write(row["client_id"]) as connection:
            if not dataset_records.end_processing(connection, row["id"], now, values):
                return
            ended = {**row, **values}
            if values["status"] == DatasetStatus.PROCESSED:
                announce(connection, ended, now)
            else:
                emit(connection, "dataset.failed", ended, now, code=values["error"]["code"])


def _failure(
    code: str, message: str, details: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    error = {"code": code, "message": message, "details": details or []}
    return {"status": DatasetStatus.FAILED, "error": error}
