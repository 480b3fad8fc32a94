"""The files that workers may reach, and the test at every start that they can reach nothing else."""

import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from tuneship.runtime.intrusion_targets import opened
from tuneship.runtime.landlock import Places
from tuneship.runtime.worker_processes import TEMPORARY, LocalProcesses
from tuneship.runtime.worker_protocol import WorkerSpec
from tuneship.service.catalogues.base_models import Catalogue, CataloguedModel
from tuneship.service.catalogues.origins import added_folder
from tuneship.settings import ServiceSettings
from tuneship.store.audit_heads import heads_file
from tuneship.store.database import SQLITE_FILE
from tuneship.store.open_blobs import readable_root

logger = logging.getLogger(__name__)

TEST_TIMEOUT_S = 60.0
POLL_S = 0.02


def worker_folder(settings: ServiceSettings, kind: str) -> Path:
    """The folder in which workers find the stored objects of one kind: the files themselves, or copies from a bucket.

    Created here, since a process can only be given what exists.
    """
    folder = readable_root(settings) / kind
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def training_places(
    settings: ServiceSettings, work: Path, bases: Iterable[CataloguedModel]
) -> Places:
    """The folders that a training process may read and write before it has a job; then only the job's remain."""
    datasets = worker_folder(settings, "datasets")
    # The whole folder, so that a process that waits already can read a model that is added later.
    added = added_folder(settings.data_dir)
    added.mkdir(mode=0o700, exist_ok=True)
    return Places((*(base.path for base in bases), added, datasets), (work,))


def can_isolate(settings: ServiceSettings) -> bool:
    """Start a worker like those that serve, which tries to break out; True when every attempt is refused."""
    # A service that was killed during the test has left its folder.
    for leftover in (settings.data_dir / "scratch").glob(f"{TEMPORARY}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        outcomes = intrusion_outcomes(settings)
    except (OSError, ValueError) as error:
        logger.warning("workers are not isolated, the test could not be made: %s", error)
        return False
    succeeded = [name for name, outcome in outcomes.items() if outcome != "refused"]
    if succeeded:
        logger.warning("workers are not isolated, these ways are open: %s", ", ".join(succeeded))
    return not succeeded


def intrusion_outcomes(settings: ServiceSettings) -> dict[str, str]:
    """The outcome of each attempt by its name. Raises ValueError when the intruder could not make them."""
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
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder,
        opened(
            data_dir / "scratch",
            processes={"the service": os.getpid()},
            secrets=[str(file) for file in files if file.is_file()],
            folders=[str(path) for path in (*folders, worker_folder(settings, "datasets"))],
            descriptors=[theirs.fileno()],
        ) as targets,
    ):
        log = Path(folder) / "log"
        arguments, line = (targets.to_json(),), (theirs.fileno(),)
        worker = LocalProcesses(isolated=True).start(
            WorkerSpec("tuneship.runtime.intrusion", arguments, log, inherited=line, places=places)
        )
        deadline = time.monotonic() + TEST_TIMEOUT_S
        while worker.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        worker.kill()
        last = log.read_text().splitlines()[-1:]
    if worker.exit_code() != 0:
        raise ValueError(*last)
    return json.loads("".join(last))
