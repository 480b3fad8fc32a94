"""Moves files without a row to `<data dir>/set-aside/<time>/`, where they stay until an operator removes them.

They are not deleted, because a starting service cannot know why a row is missing: an upload that was interrupted looks
like a dataset whose row was lost with the database.
"""

import shutil
from collections.abc import Collection, Set
from datetime import datetime
from pathlib import Path

import sqlalchemy as sa

from tuneship.contract.jobs import ALIVE
from tuneship.host.durable import flush
from tuneship.store.database import tables
from tuneship.store.files.blobs import CHECKPOINTS

SET_ASIDE = "set-aside"
# Objects that a job needs only while it has not ended, and can do without.
PASSING = ("work/", f"{CHECKPOINTS}/")


def objects_of(connection: sa.Connection) -> set[str]:
    """The folders of all datasets, models, files of batches and unfinished jobs, as `files_in` writes them.

    Those of `PASSING` need not exist.
    """
    alive = sa.select(tables.jobs.c.id).where(tables.jobs.c.status.in_(ALIVE))
    queries = {
        "datasets": sa.select(tables.datasets.c.id),
        "files": sa.select(tables.batch_files.c.id),
        "work": alive,
        CHECKPOINTS: alive,
    }
    known = {
        f"{kind}/{identifier}"
        for kind, query in queries.items()
        for identifier in connection.scalars(query)
    }
    return known | set(connection.scalars(sa.select(tables.models.c.blob)))


def set_aside(data_dir: Path, objects: Collection[str], now: datetime) -> Path | None:
    """Move folders into a new folder below `set-aside`; return it, None without `objects`. Raises `OSError`."""
    if not objects:
        return None
    root, name = data_dir / SET_ASIDE, now.strftime("%Y-%m-%dT%H-%M-%SZ")
    root.mkdir(mode=0o700, exist_ok=True)
    target, number = root / name, 1
    while True:
        try:
            target.mkdir(mode=0o700)
        except FileExistsError:  # two services have started in the same second
            number += 1
            target = root / f"{name}-{number}"
        else:
            break
    flush(root)

    for path in sorted(objects):
        kind, _, name = path.partition("/")
        source = (data_dir if kind == "work" else data_dir / "blobs") / kind / name
        (target / kind).mkdir(mode=0o700, exist_ok=True)
        # A rename would fail where `blobs` is on another file system.
        shutil.move(source, target / kind / name)
        flush(target / kind)
    flush(target)
    return target


def left_over(connection: sa.Connection, files: Set[str], known: Set[str]) -> set[str]:
    """The folders in `files` that are neither in `known` nor temporary ones of ended jobs.

    `files`: from `files_in`; `known`: from `objects_of`. What an ended job leaves of `PASSING` is removed later.
    """
    unknown = set(files - known)
    if any(path.startswith(PASSING) for path in unknown):
        jobs = list(connection.scalars(sa.select(tables.jobs.c.id)))
        unknown -= {f"{kind}{name}" for kind in PASSING for name in jobs}
    return unknown
