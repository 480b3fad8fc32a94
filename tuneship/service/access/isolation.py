"""The files that workers may reach, and the test at every start that they can reach nothing else."""

import logging
import os
import shutil
from functools import partial
from pathlib import Path

from tuneship.isolation.landlock import Places
from tuneship.isolation.self_check import open_ways
from tuneship.processes.worker_processes import TEMPORARY, last_line
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.catalogues.origins import added_folder
from tuneship.settings import FileSettings, ServiceSettings
from tuneship.store.database.database import SQLITE_FILE
from tuneship.store.files.open_blobs import readable_root
from tuneship.store.records.audit_heads import heads_file

logger = logging.getLogger(__name__)


def worker_folder(settings: FileSettings, kind: str) -> Path:
    """The folder in which workers find stored objects of one kind: the originals, or copies from a bucket.

    Created here, since a process can only be given what exists.
    """
    folder = readable_root(settings) / kind
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def can_isolate(settings: ServiceSettings) -> bool:
    """Whether a worker like those that serve fails in all its tries to break out."""
    # A service that was killed during the test has left its folder.
    for leftover in (settings.data_dir / "scratch").glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        still_open = _open_ways(settings)
    except (OSError, ValueError) as error:
        logger.warning("workers are not isolated, the test could not be made: %s", error)
        return False
    if still_open:
        logger.warning("workers are not isolated, these ways are open: %s", ", ".join(still_open))
    return not still_open


def _open_ways(settings: ServiceSettings) -> list[str]:
    data_dir = settings.data_dir
    files = [
        *(settings.master_key, heads_file(settings.audit_heads, data_dir)),
        *(data_dir / name for name in ("credentials.json", SQLITE_FILE, "lock")),
    ]
    others = (data_dir / name for name in ("scratch", "work", "logs", "blobs", "cache"))
    folders = [data_dir, *(path for path in others if path.is_dir())]
    added = added_folder(data_dir)
    bases = Catalogue(settings.model_catalogue, added)
    places = Places((*(base.path for base in bases), added, worker_folder(settings, "models")))
    return open_ways(
        partial(last_line, places=places),
        data_dir / "scratch",
        processes={"the service": os.getpid()},
        secrets=[file for file in files if file.is_file()],
        folders=[*folders, worker_folder(settings, "datasets")],
    )
