"""Roll-out records on disk: one append-only JSON-lines file per roll-out, every line synced before anything acts on it.

`<records>/<service>/<rollout id>.jsonl`: a worker, the guard or the next run finds there what a killed run left. One
live run per endpoint is kept by a file lock, which dies with its process. A line's meaning: `tuneship/gates/record.py`.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Ended, Fact, Record, from_lines, to_line


class RecordFile:
    """One roll-out's record: what is in memory is on disk."""

    def __init__(self, path: Path) -> None:
        """Read what there is; the folder is made with the first line."""
        self.path = path
        content = path.read_bytes() if path.is_file() else b""
        # A line without its end was never synced, so nothing was done because of it. It is cut off at the
        # next append, not here: a reader of another process's record must not touch it.
        self._length = content.rfind(b"\n") + 1
        self.record: Record = from_lines(content[: self._length].decode().splitlines())

    def append(self, *facts: Fact) -> None:
        """Add facts and return when the disk has them."""
        lines = "".join(to_line(fact) + "\n" for fact in facts).encode()
        is_new = not self.path.exists()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.truncate(self._length)
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            _sync_folder(self.path.parent)
        self._length += len(lines)
        self.record = self.record.plus(*facts)

    @property
    def is_open(self) -> bool:
        """Nobody has ended it for good: a pause and a return that was not confirmed leave it open."""
        ended = [fact for fact in self.record.facts if isinstance(fact, Ended)]
        return not ended or ended[-1].outcome in ("paused", "rollback_incomplete")


class RecordFolder:
    """The records of one service."""

    def __init__(self, root: Path, service_url: str) -> None:
        """Name the folder after the service's address, readable for people."""
        address = re.sub(r"^https?://", "", service_url)
        self.path = root.expanduser() / re.sub(r"[^A-Za-z0-9.]+", "-", address).strip("-")

    def of(self, plan: CanaryPlan) -> list[RecordFile]:
        """The records of this endpoint and pair, in the order in which they began."""
        files = [RecordFile(path) for path in sorted(self.path.glob("*.jsonl"))]
        return [file for file in files if file.record.facts and _concerns(file.record, plan)]

    def new(self, plan: CanaryPlan) -> RecordFile:
        """The next record of this endpoint and pair.

        The roll-out's id is the same until its first line is written, so that a create that is repeated after a crash
        carries the same idempotency key.
        """
        number = len(self.of(plan)) + 1
        endpoint = plan.endpoint_id or plan.endpoint_name
        text = f"{endpoint}|{plan.baseline_deployment_id}|{plan.candidate_deployment_id}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return RecordFile(self.path / f"rollout-{digest}-{number:04d}.jsonl")

    @contextmanager
    def lock(self, plan: CanaryPlan) -> Generator[bool]:
        """Hold the endpoint for this process; False where another live run on this host holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        endpoint = str(plan.endpoint_id or plan.endpoint_name)
        name = hashlib.sha256(endpoint.encode()).hexdigest()[:16]
        with (self.path / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def _concerns(record: Record, plan: CanaryPlan) -> bool:
    begun = record.begun
    pair = (plan.baseline_deployment_id, plan.candidate_deployment_id)
    recorded = (begun.plan["baseline_deployment_id"], begun.plan["candidate_deployment_id"])
    if plan.endpoint_id is not None:
        return pair == recorded and begun.endpoint_id == plan.endpoint_id
    return pair == recorded and begun.plan["endpoint_name"] == plan.endpoint_name


def _sync_folder(folder: Path) -> None:
    """The file's name survives a power cut only when its folder is synced too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
