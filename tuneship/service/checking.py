"""Checks the stored data: rows against files, files against their digests, and the keys of sealed files."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from tuneship.security.sealed_files import ObjectDamaged
from tuneship.security.vault import SealBroken
from tuneship.service.access.data_keys import Keyring, keyring_of
from tuneship.service.open_installation import Installation
from tuneship.store.files.blobs import Blobs
from tuneship.store.files.quarantine import left_over, objects_of
from tuneship.store.files.stored_files import StoredObject, stored_objects
from tuneship.store.installation.ownership import work_in
from tuneship.store.records import job_records, object_key_records


@dataclass(frozen=True)
class Report:
    """The result of a check."""

    # Datasets and models that rows name.
    objects: int
    keys: int
    # The fault of each object, by its id. Holds no text of a user.
    faults: Mapping[str, str]


def check(opened: Installation, data_dir: Path, pause_s: float) -> Report:
    """Check everything, and faulty objects twice, with a pause between. Raises SQLAlchemy's errors, and `BlobsAway`."""
    report = _look(opened, data_dir)
    if not report.faults:
        return report
    # A running service stores a file before its row and removes it after: only a fault that lasts is one.
    time.sleep(pause_s)
    again = _look(opened, data_dir, only=frozenset(report.faults))
    faults = {name: fault for name, fault in again.faults.items() if name in report.faults}
    return Report(report.objects, report.keys, faults)


def _look(opened: Installation, data_dir: Path, only: frozenset[str] | None = None) -> Report:
    # Before the rows, since an object comes before its row.
    files = opened.blobs.names() | work_in(data_dir)
    with opened.database.read() as connection:
        objects = list(stored_objects(connection))
        extra = left_over(connection, files, objects_of(connection))
        keys = _Keys(connection, keyring_of(opened.secret))
        faults = {**keys.broken(), **keys.missing(objects)}
    for stored in objects:
        if only is None or stored.id in only:
            fault = file_fault(opened.blobs, stored)
            if fault is not None:
                faults[stored.id] = fault
    faults |= dict.fromkeys(extra, "there is no row that names it")
    return Report(len(objects), keys.count, faults)


def file_fault(blobs: Blobs, stored: StoredObject) -> str | None:
    """The first missing, damaged or unreadable file, as a message; None if all are sound."""
    for path, digest in stored.files.items():
        name = path.rpartition("/")[2]
        try:
            if blobs.digest_of(path) != digest:
                return f"{name} is not the file that was stored"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return None


class _Keys:
    """The wrapped keys of one view of the rows."""

    def __init__(self, connection: sa.Connection, keyring: Keyring) -> None:
        self._connection = connection
        self._keyring = keyring
        self._rows = object_key_records.all_of(connection)

    @property
    def count(self) -> int:
        return len(self._rows)

    def broken(self) -> dict[str, str]:
        """The keys that the master key, or the tenant's key, does not open."""
        faults: dict[str, str] = {}
        for row in self._rows:
            try:
                self._keyring.open(self._connection, row)
            except (ObjectDamaged, SealBroken):
                faults[row.object_id] = "its key cannot be opened"
        return faults

    def missing(self, objects: list[StoredObject]) -> dict[str, str]:
        """The objects and running jobs without a key."""
        needed = [stored.id for stored in objects]
        needed += [f"jobs/{job['id']}" for job in job_records.alive(self._connection)]
        known = {row.object_id for row in self._rows}
        return {name: "its key is missing" for name in needed if name not in known}
