"""`tuneship backup`, `restore` and `check`. Backup and check work whether the service runs or not.

`backup` exits with 4 when it is complete but files were missing or damaged before it, and `check` when it finds faults.
Errors are one line on standard error with exit code 1; unfinished work is removed again, also on Ctrl-C.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneship.cli.common import fail, opened_installation, service_settings
from tuneship.contract.common import count, render_time
from tuneship.host.startup import StartupError

if TYPE_CHECKING:  # the light install has no service
    from tuneship.store.database.rows import Row
    from tuneship.store.installation.backup_format import Manifest
    from tuneship.store.installation.restore import RestoreTarget

WRONG = 4
# Longer than a running service takes between storing a file and its row.
RECHECK_S = 5.0

app = typer.Typer()

DataDir = Annotated[
    Path | None, typer.Option(help="The data directory of the service, as for `tuneship serve`.")
]
Folder = Annotated[Path, typer.Argument(help="The folder of the backup.")]


@app.command()
def backup(
    folder: Folder,
    with_master_key: Annotated[
        bool,
        typer.Option(help="Put the master key into the backup, which then opens everything in it."),
    ] = False,
    verify: Annotated[
        bool, typer.Option(help="Read again what earlier backups have put into the folder.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Write a complete backup into a folder, or bring the one there up to date."""
    settings = service_settings(data_dir=data_dir)
    target, own = folder.resolve(), settings.data_dir.resolve()
    # A backup inside of what it backs up would grow with each run, and be lost with it.
    if target.is_relative_to(own) or own.is_relative_to(target):
        fail(f"{folder} and the data directory lie in each other: name a folder elsewhere")
    with opened_installation(settings, reads_files=True) as opened, _plain_faults():
        from tuneship.store.installation.backup import Backup, Source  # noqa: PLC0415
        from tuneship.store.records.audit_heads import heads_file  # noqa: PLC0415 - the light install

        heads = heads_file(settings.audit_heads, settings.data_dir)
        source = Source(
            opened.database, settings.data_dir, heads, settings.master_key, opened.blobs
        )
        run = Backup(source, folder, datetime.now(UTC), version("tuneship"), verifies=verify)
        manifest = run.make(with_master_key=with_master_key)
    typer.echo(
        f"backup of {_counted(manifest)} in {folder}: {count(run.copied, 'file')} copied, the others "
        "were there"
    )
    if manifest.has_master_key:
        typer.echo("the backup holds the master key: whoever has it can read everything", err=True)
    else:
        text = f"the master key is not in it: keep a copy of {settings.master_key} elsewhere"
        typer.echo(text, err=True)
    if manifest.missing:
        lacking = (
            f"{count(len(manifest.missing), 'file')} of datasets or models, missing or damaged"
        )
        fail(f"the backup is complete, except for {lacking}: `tuneship check` names each", WRONG)


@app.command()
def restore(
    folder: Folder,
    revoke_keys: Annotated[
        bool,
        typer.Option(help="Revoke every API key of the backup; the next start makes a new one."),
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Put a backup into a new data directory and an empty database; nothing is overwritten."""
    settings = service_settings(data_dir=data_dir)
    # Before the first file is made: what is restored is for the service's own user.
    os.umask(0o077)
    try:
        from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415 - the light install

        from tuneship.service.open_installation import direct_url_of  # noqa: PLC0415
        from tuneship.store.database.database import url_of  # noqa: PLC0415
        from tuneship.store.files.blobs import BlobsAway  # noqa: PLC0415
        from tuneship.store.files.open_blobs import blobs_of  # noqa: PLC0415
        from tuneship.store.installation.restore import (  # noqa: PLC0415
            RestoreTarget,
            complete_backup,
            prepared,
            settle,
        )
        from tuneship.store.records.audit_heads import heads_file  # noqa: PLC0415
    except ModuleNotFoundError as error:
        fail(f"this needs `pip install 'tuneship[service]'` (missing: {error.name})")
    try:
        with _plain_faults():
            heads = heads_file(settings.audit_heads, settings.data_dir)
            url = url_of(settings.database_url, settings.data_dir)
            manifest = complete_backup(folder)
            blobs = blobs_of(settings)
            target = RestoreTarget(
                settings.data_dir, url, direct_url_of(settings), heads, settings.master_key, blobs
            )
            with prepared(folder, manifest, target) as made:
                secret = checked_master_key(folder, made, target)
                keys = keys_in_force(made)
                if revoke_keys:
                    revoke(keys, made, secret)
                own = secret if not target.master_key.exists() else None
                settle(made, target, None if own is None else f"{own.hex()}\n")
    except SQLAlchemyError as error:  # its own text may hold the URL
        fail(f"the database failed: {type(error).__name__}")
    except BlobsAway as fault:
        fail(f"the files cannot be stored in {settings.blob_url}: {fault}")
    typer.echo(f"restored {_counted(manifest)} to {settings.data_dir}, as of {manifest.made_at}")
    text = f"all changes since {manifest.made_at} are undone, deletions included"
    typer.echo(f"{text} (docs/operations.md)", err=True)
    ended = "revoked" if revoke_keys else "in force, even if revoked since"
    typer.echo(f"{count(len(keys), 'API key')} of the backup, {ended}:", err=True)
    for key in keys:
        made_at = render_time(key["created_at"])
        typer.echo(f"  {key['id']} of {key['client_id']}, created {made_at}", err=True)
    if not settings.master_key.exists():
        text = f"put the master key into {settings.master_key} before you start the service"
        typer.echo(text, err=True)


@app.command()
def check(
    data_dir: DataDir = None,
    recheck_after: Annotated[float, typer.Option(min=0, hidden=True)] = RECHECK_S,
) -> None:
    """Compare rows, files, digests and keys, and name what is wrong."""
    settings = service_settings(data_dir=data_dir)
    with opened_installation(settings, reads_files=True) as opened:
        from tuneship.service.checking import check as compare  # noqa: PLC0415 - the light install

        report = compare(opened, settings.data_dir, recheck_after)
    for name, fault in sorted(report.faults.items()):
        typer.echo(f"{name}: {fault}")
    if report.faults:
        fail(f"faults: {len(report.faults)}", WRONG)
    typer.echo(
        f"as it should be: {count(report.objects, 'dataset or model', 'datasets and models')}, "
        f"{count(report.keys, 'data key')}"
    )


def _counted(manifest: "Manifest") -> str:
    names = {path.rpartition("/")[0] for path in manifest.files}
    datasets = sum(name.startswith("datasets/") for name in names)
    return f"{count(datasets, 'dataset')} and {count(len(names) - datasets, 'model')}"


def keys_in_force(made: Path) -> "list[Row]":
    """The API keys that restored rows let in, oldest first."""
    from tuneship.service.access.api_keys import is_in_force  # noqa: PLC0415 - the light install
    from tuneship.store.installation.backup_format import rows_in  # noqa: PLC0415
    from tuneship.store.installation.restore import ROWS  # noqa: PLC0415
    from tuneship.store.records import api_key_records  # noqa: PLC0415

    with rows_in(made / ROWS) as rows, rows.read() as connection:
        found = api_key_records.all_of(connection)
    return [row for row in found if is_in_force(row, datetime.now(UTC))]


def revoke(keys: "list[Row]", made: Path, secret: bytes | None) -> None:
    """Revoke API keys in restored rows, with a row of the audit chain for each. Raises `BackupFault`."""
    from tuneship.security.master_key import derived_secret  # noqa: PLC0415 - the light install
    from tuneship.service.access.api_keys import Keys  # noqa: PLC0415
    from tuneship.store.installation.backup_format import BackupFault, rows_in  # noqa: PLC0415
    from tuneship.store.installation.restore import ROWS  # noqa: PLC0415
    from tuneship.store.records.audit import Chain  # noqa: PLC0415

    if secret is None:
        raise BackupFault(
            "--revoke-keys needs the master key, which signs the audit rows: put it in its place first"
        )
    chain = Chain(derived_secret(secret, "audit"))
    with rows_in(made / ROWS) as rows:
        # A backup of PostgreSQL may hold earlier rows that are not in the chain.
        chain.link_all(rows)
        of_backup = Keys(rows, derived_secret(secret, "keys"), lambda: datetime.now(UTC), chain)
        for key in keys:
            of_backup.revoke(key["id"])


def checked_master_key(folder: Path, made: Path, target: "RestoreTarget") -> bytes | None:
    """The master key of the target or else of the backup. Raises `AnotherMasterKey` if it is not that of the rows."""
    from tuneship.security.master_key import read_secret  # noqa: PLC0415 - the light install
    from tuneship.service.open_installation import check_key  # noqa: PLC0415
    from tuneship.store.installation.backup_format import KEY, rows_in  # noqa: PLC0415
    from tuneship.store.installation.restore import ROWS  # noqa: PLC0415

    file = target.master_key if target.master_key.exists() else folder / KEY
    if not file.exists():
        return None
    secret = read_secret(file)
    with rows_in(made / ROWS) as rows, rows.read() as connection:
        check_key(connection, secret)
    return secret


@contextmanager
def _plain_faults() -> Generator[None]:
    try:
        yield
    except StartupError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.strerror}: {error.filename}" if error.filename else str(error))
    except KeyboardInterrupt:
        fail("broken off; nothing was changed", 130)
