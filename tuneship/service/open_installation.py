"""Opens an installation: its database, its files and its master key, which must belong together.

All mistakes that an operator can make before a start are checked here, in an order in which nothing is created or
changed until everything before it is right.
"""

import hmac
import logging
from collections.abc import Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import sqlalchemy as sa

from tuneship.contract.common import count
from tuneship.host.startup import StartupError
from tuneship.security.master_key import derived_secret, read_or_make_secret, read_secret
from tuneship.service.access.data_keys import AnotherMasterKey
from tuneship.settings import ServiceSettings
from tuneship.store.database.database import Database, parsed_url, url_of
from tuneship.store.database.tables import InstallationRow
from tuneship.store.files.blobs import Blobs
from tuneship.store.files.open_blobs import blobs_of
from tuneship.store.files.quarantine import PASSING, objects_of
from tuneship.store.installation import installation
from tuneship.store.installation.cut_log import lost_pages
from tuneship.store.installation.installation import FoundDatabase
from tuneship.store.installation.ownership import (
    RECORD,
    check_membership,
    check_name,
    check_ownership,
    read_record,
    record_ownership,
)
from tuneship.store.records import audit
from tuneship.store.records.audit_heads import Head, Heads, HeadsDamaged, heads_file

# A clock may be set back this far, e.g. by NTP after a start.
CLOCK_TOLERANCE = timedelta(minutes=5)

logger = logging.getLogger(__name__)


class NoInstallation(StartupError):
    """No service has run on the data directory of a command."""


class ClockBehind(StartupError):
    """The host's clock is earlier than a moment that the service has already seen."""


class OtherCluster(StartupError):
    """The database is that of a cluster, and the settings name another one or none."""


class FilesOfAnotherTime(StartupError):
    """The database is from before the files, or the files are not there."""


@dataclass(frozen=True)
class Installation:
    """The database, the master key and the files of an installation."""

    database: Database
    # The master key.
    secret: bytes
    blobs: Blobs
    # The newest time that an earlier run has recorded.
    last_seen: datetime | None = None


def has_installation(settings: ServiceSettings) -> bool:
    """Whether a service has run on the data directory or with the database. Raises as `open_for_command` does."""
    url = url_of(settings.database_url, settings.data_dir)
    check_name(settings.data_dir, url)
    return installation.look(direct_url_of(settings)).is_used or settings.master_key.is_file()


def open_for_command(settings: ServiceSettings, *, reads_files: bool = True) -> Installation:
    """Open the existing installation without creating, migrating or writing anything. Raises `StartupError`.

    `reads_files`: whether the command needs datasets and models, so that a bucket must answer.
    """
    url = url_of(settings.database_url, settings.data_dir)
    check_name(settings.data_dir, url)
    found = installation.look(direct_url_of(settings))
    check_ownership(settings.data_dir, url, found)
    if not found.is_used and not settings.master_key.is_file():
        raise NoInstallation(
            f"no service has run on {settings.data_dir}: start `tuneship serve`, or name --data-dir"
        )
    secret, blobs = read_secret(settings.master_key), blobs_of(settings)
    if reads_files:
        blobs.check(found.id, writes=False)
    database = Database(direct_url_of(settings), migrates=False)
    try:
        with database.read() as connection:
            check_key(connection, secret)
    except BaseException:
        database.close()
        raise
    return Installation(database, secret, blobs)


def open_for_service(
    settings: ServiceSettings, now: datetime, *, accept_clock: bool = False
) -> Installation:
    """Open the installation for the only service on it, and create it if there is none.

    A master key is created for a new database only, and before it: a kill between the two leaves a key that protects
    nothing yet. Raises `StartupError`, `OSError`, SQLAlchemy's errors.
    """
    url = url_of(settings.database_url, settings.data_dir)
    check_name(settings.data_dir, url)
    _report_lost_changes(url)
    found = installation.look(direct_url_of(settings))
    _check_cluster(found, None)
    check_ownership(settings.data_dir, url, found)
    blobs = blobs_of(settings)
    blobs.check(found.id)
    read = read_secret if found.is_used else read_or_make_secret
    secret = read(settings.master_key)
    database = _database(settings, url)
    try:
        database.claim()
        # Outside of the transaction that writes, since the store of files may be far away.
        with database.read() as connection:
            known = objects_of(connection)
        lost = _lost_files(blobs, {name for name in known if not name.startswith(PASSING)})
        with database.write() as connection:
            check_key(connection, secret)
            row = installation.row_of(connection)
            _check_files(connection, settings, secret, now, lost)
            _check_clock(row, now, accept_clock=accept_clock)
            # The file comes first: after a kill here its number is one ahead, which the next start accepts.
            record_ownership(settings.data_dir, url, row["id"], row["starts"] + 1)
            installation.count_start(connection, _key_check(secret))
            if accept_clock:
                installation.set_time(connection, now)
        # A kill before this leaves a bucket without a mark, which the next start writes.
        blobs.claim(row["id"], known)
    except BaseException:
        database.close()
        raise
    return Installation(database, secret, blobs, None if accept_clock else row["newest_time"])


def open_for_member(
    settings: ServiceSettings, cluster: str, *, accept_clock: bool = False
) -> Installation:
    """Open the installation as a member of a cluster, while others may be at work: nothing of theirs is changed.

    Times are the database's. Raises as `open_for_service` does, and `OtherCluster`.
    """
    url = url_of(settings.database_url, settings.data_dir)
    found = installation.look(direct_url_of(settings))
    _check_cluster(found, cluster)
    check_membership(settings.data_dir, url, found)
    blobs = blobs_of(settings)
    blobs.check(found.id)
    # Never made here: each member would have one of its own.
    secret = read_secret(settings.master_key)
    database = _database(settings, url, is_shared=True)
    try:
        database.claim(alone=False)
        with database.read() as connection:
            known = objects_of(connection)
        lost = _lost_files(blobs, {name for name in known if not name.startswith(PASSING)})
        if lost is not None:
            raise FilesOfAnotherTime(lost)  # noqa: TRY301 - the connections are closed below
        with database.write() as connection:
            check_key(connection, secret)
            row = installation.row_of(connection)
            now = connection.execute(sa.select(sa.func.clock_timestamp())).scalar_one()
            _check_clock(row, now, accept_clock=accept_clock)
            installation.join_cluster(connection, _key_check(secret), cluster)
            if accept_clock:
                installation.set_time(connection, now)
        # Another cluster may have come first.
        _check_cluster(installation.look(direct_url_of(settings)), cluster)
        record_ownership(settings.data_dir, url, row["id"], None)
        blobs.claim(row["id"], known)
    except BaseException:
        database.close()
        raise
    return Installation(database, secret, blobs, None if accept_clock else row["newest_time"])


def _report_lost_changes(url: str) -> None:
    parsed = parsed_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return
    pages = lost_pages(Path(parsed.database))
    if pages:
        text = (
            "changes that were acknowledged are missing: %s at the end of the write-ahead log %s-wal, cut off, "
            "damaged or removed while no service ran (docs/operations.md)"
        )
        logger.error(text, count(pages, "page"), parsed.database)


def direct_url_of(settings: ServiceSettings) -> str:
    """The URL of the database itself, which leads past a pooler."""
    return settings.listen_url or url_of(settings.database_url, settings.data_dir)


def _database(settings: ServiceSettings, url: str, *, is_shared: bool = False) -> Database:
    return Database(
        url,
        is_shared=is_shared,
        listen_url=settings.listen_url,
        connections=settings.database_connections,
    )


def _check_cluster(found: FoundDatabase, cluster: str | None) -> None:
    """Raises `OtherCluster` when the database is not that of `cluster`; None: of a service that is alone."""
    if found.cluster in (None, cluster):
        return
    named = f"TUNESHIP_CLUSTER names {cluster!r}" if cluster else "TUNESHIP_CLUSTER is not set"
    raise OtherCluster(
        f"the database is that of the cluster {found.cluster!r}, and {named}: name that cluster, or another database "
        "(docs/cluster.md says how to leave a cluster)"
    )


def _key_check(secret: bytes) -> bytes:
    """A value by which the database recognizes its master key, without revealing the key."""
    return derived_secret(secret, "key check")


def check_key(connection: sa.Connection, secret: bytes) -> None:
    """Raises `AnotherMasterKey` when the database was made with another master key."""
    kept = installation.key_check_of(connection)
    if kept is not None and not hmac.compare_digest(kept, _key_check(secret)):
        raise AnotherMasterKey


def _check_clock(row: InstallationRow, now: datetime, *, accept_clock: bool) -> None:
    """Raises `ClockBehind` if the clock is before a time at which the service ran."""
    # Otherwise expired keys would be valid again, and new rows would look older than old ones.
    newest: datetime | None = row["newest_time"]
    if newest is None or now > newest - CLOCK_TOLERANCE:
        return
    if accept_clock:
        logger.warning("the clock is accepted, %s before the newest known time", newest - now)
        return
    raise ClockBehind(
        f"the clock says {now:%Y-%m-%d %H:%M} UTC, but the service has already run at "
        f"{newest:%Y-%m-%d %H:%M} UTC: set the clock, or, when it is right and was wrong before, "
        "start once with --accept-clock"
    )


def _lost_files(blobs: Blobs, named: Set[str]) -> str | None:
    """The error of a store that has none of the objects in the rows, with the remedy; None if all is well."""
    if not named or blobs.has_any(named):
        return None
    what = "mount or restore that folder"
    if blobs.is_remote:
        what = "copy the files of the data directory there"
    wanted = count(len(named), "dataset or model", "datasets and models")
    return f"the database names {wanted}, and {blobs.place} has none of them: {what}"


def _check_files(
    connection: sa.Connection,
    settings: ServiceSettings,
    secret: bytes,
    now: datetime,
    lost: str | None,
) -> None:
    """Raises `FilesOfAnotherTime`, unless an operator has confirmed that database and files belong together."""
    record = read_record(settings.data_dir)
    if record is None:
        return
    file = heads_file(settings.audit_heads, settings.data_dir)
    heads = Heads(file, derived_secret(secret, "audit heads"))
    if record.starts is None:
        # The operator's confirmation: the chain continues from the database's last row.
        heads.append(Head(*audit.head_of(connection)), now)
        return

    record_file = settings.data_dir / RECORD
    identity = installation.row_of(connection)["id"]
    hint = f"to continue with it as it is, write only the line 'id {identity}' into {record_file}"
    if lost is not None:
        raise FilesOfAnotherTime(f"{lost}; {hint}")

    # A signed head names a row of the audit chain that an older database does not have.
    try:
        head = heads.last()
    except HeadsDamaged as fault:
        logger.warning("%s: %s; `tuneship audit verify` says more", file, fault)
        return
    if head is None or [row["mac"] for row in audit.rows_at(connection, [head.seq])] == [head.mac]:
        return
    last, _ = audit.head_of(connection)
    raise FilesOfAnotherTime(
        f"the database is older than the files: its audit chain ends with row {last} and does "
        f"not hold row {head.seq} as it was signed in {file}: restore the newest database "
        f"(docs/operations.md); {hint}"
    )
