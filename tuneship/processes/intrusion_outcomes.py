"""Has an isolated worker try to break out, and reads how each attempt ended. The attempts: `intrusion.py`."""

import json
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tuneship.isolation.attacks.intrusion_targets import opened
from tuneship.isolation.landlock import Places
from tuneship.processes.worker_processes import TEMPORARY, LocalProcesses
from tuneship.processes.worker_protocol import WorkerSpec

TEST_TIMEOUT_S = 60.0
POLL_S = 0.02


def intrusion_outcomes(
    places: Places,
    scratch: Path,
    *,
    processes: Mapping[str, int],
    secrets: Sequence[Path] = (),
    folders: Sequence[Path],
) -> dict[str, str]:
    """The outcome of each attempt by its name. Raises `ValueError` when the intruder failed, and `OSError`.

    `places`: all that it may reach. `scratch`: a folder beside them, for decoys. It must not reach the `processes`,
    read the `secrets` or list the `folders`.
    """
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder,
        opened(scratch) as made,
    ):
        targets = replace(
            made,
            processes=dict(processes),
            secrets=tuple(map(str, secrets)),
            folders=tuple(map(str, folders)),
            descriptors=(theirs.fileno(),),
        )
        log = Path(folder) / "log"
        arguments, line = (targets.to_json(),), (theirs.fileno(),)
        worker = LocalProcesses(isolated=True).start(
            WorkerSpec(
                "tuneship.isolation.attacks.intrusion",
                arguments,
                log,
                inherited=line,
                places=places,
            )
        )
        deadline = time.monotonic() + TEST_TIMEOUT_S
        while worker.exit_code() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        worker.kill()
        last = log.read_text().splitlines()[-1:]
    if worker.exit_code() != 0:
        raise ValueError(*last)
    return json.loads("".join(last))
