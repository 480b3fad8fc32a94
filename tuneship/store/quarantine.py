"""Files that no row names are moved to `<data dir>/set-aside/<time>/` and stay there until an operator removes them.

A start cannot know why a row is missing: an upload that was never answered looks like a dataset whose row was lost with
the database.
"""

import shutil
from collections.abc import Collection, Set
from datetime import datetime
from pathlib import Path

import sqlalchemy as sa

from tuneship.contract.jobs import ALIVE
from tuneship.host.durable import flush
from tuneship.store import tables

SET_ASIDE = "set-aside"


def objects_of(connection: sa.Connection) -> set[str]:
    """The folders that rows name, as `files_in` has them: those of datasets, models, and jobs that have not ended."""
    alive = tables.jobs.c.status.in_(ALIVE)
    queries = {
        "datasets": sa.select(tables.datasets.c.id),
        "models": sa.select(tables.models.c.job_id),
        "work": sa.select(tables.jobs.c.id).where(alive),
    }
    return {
        f"{kind}/{identifier}"
        for kind, query in queries.items()
        for identifier in connection.scalars(query)
    }


def set_aside(data_dir: Path, objects: Collection[str], now: datetime) -> Path | None:
    """Move these folders out of the way; answers where they are now, None when there were none. Raises `OSError`."""
    if not objects:
        return None
    place = _new_folder(data_dir / SET_ASIDE, now)
    for one in sorted(objects):
        kind, _, name = one.partition("/")
        source = (data_dir if kind == "work" else data_dir / "blobs") / kind / name
        (place / kind).mkdir(mode=0o700, exist_ok=True)
        shutil.move(source, place / kind / name)  # also where `blobs` is a file system of its own
        flush(place / kind)
    flush(place)
    return place


def _new_folder(root: Path, now: datetime) -> Path:
    """Named after the time; two starts within a second get folders of their own."""
    root.mkdir(mode=0o700, exist_ok=True)
    name = now.strftime("%Y-%m-%dT%H-%M-%SZ")
    number = 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            number += 1
        else:
            flush(root)
            return folder


def left_over(connection: sa.Connection, files: Set[str], known: Set[str]) -> set[str]:
    """Folders that no row names. Those of jobs that have ended are not among them: a row names these jobs.

    `files`: as `files_in` has them; `known`: as `objects_of` does.
    """
    unknown = set(files - known)
    if any(one.startswith("work/") for one in unknown):
        unknown -= {f"work/{name}" for name in connection.scalars(sa.select(tables.jobs.c.id))}
    return unknown
