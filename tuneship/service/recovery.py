"""Tidies up behind a service that was killed, before the next one takes requests."""

import logging
from collections.abc import Set
from pathlib import Path

from tuneship.agents.training_agents import TrainingAgents
from tuneship.contract.common import count
from tuneship.service.catalogues.adding import sweep
from tuneship.service.catalogues.origins import added_folder
from tuneship.service.context.parts import Parts
from tuneship.service.jobs.work_folders import clear_work
from tuneship.service.models.content import remove_unfinished
from tuneship.store.files.blobs import Blobs
from tuneship.store.files.quarantine import PASSING, left_over, objects_of, set_aside
from tuneship.store.installation.ownership import work_in
from tuneship.store.records import endpoint_records, idempotency, job_leases

logger = logging.getLogger(__name__)


def recover(parts: Parts, agents: TrainingAgents | None) -> None:
    """Release locks of a killed service, and set aside files without a row. No other process uses this data.

    `agents`: start the agents of trainings; None where trainings are processes of the service.
    """
    data_dir, now = parts.settings.data_dir, parts.clock()
    remove_temporary(parts.blobs, data_dir)
    parts.audit.link_all(parts.database)  # SQLite has such rows from a backup of Postgres
    with parts.database.write() as connection:
        if agents is None or agents.end_with_service:
            # Agents on other machines may go on for a while: their jobs wait until their leases are over.
            job_leases.release_all(connection, now)
        idempotency.release_all(connection)
        for client_id in set(endpoint_records.lapsed(connection, now).values()):
            endpoint_records.revert_lapsed(connection, client_id, now)
    files = parts.blobs.names() | work_in(data_dir)
    with parts.database.read() as connection:
        known = objects_of(connection)
        unknown = left_over(connection, files, known)
    if parts.blobs.is_remote:
        # The supervisor's sweep sets objects aside a day later: the store may still complete a killed upload.
        unknown = {name for name in unknown if name.startswith("work/")}
    quarantine = set_aside(data_dir, unknown, now)
    if quarantine is not None:
        text = "files without a row were moved to %s, and stay there until you remove them: %s"
        logger.warning(text, quarantine, count(len(unknown), "folder"))
    missing = [name for name in known - files if not name.startswith(PASSING)]
    if missing:
        text = "the files of %s are missing: `tuneship check` names them"
        logger.error(text, count(len(missing), "dataset or model", "datasets or models"))
    _clear_ended(data_dir, files - known - unknown)


def recover_member(parts: Parts) -> None:
    """Remove unneeded files of this machine; the leader looks after the rows and files of all members."""
    data_dir = parts.settings.data_dir
    remove_temporary(parts.blobs, data_dir)
    files = work_in(data_dir)
    with parts.database.read() as connection:
        known = objects_of(connection)
        unknown = left_over(connection, files, known)
    _clear_ended(data_dir, files - known - unknown)


def _clear_ended(data_dir: Path, names: Set[str]) -> None:
    """Remove the folders of jobs that have ended."""
    for name in names:
        if name.startswith("work/"):
            clear_work(data_dir / "work", name.removeprefix("work/"))


def remove_temporary(blobs: Blobs, data_dir: Path) -> None:
    """Remove half-written files of a killed service from this machine."""
    blobs.sweep()
    sweep(added_folder(data_dir))
    remove_unfinished(data_dir / "scratch")
