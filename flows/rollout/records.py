"""Roll-out records on disk: one append-only JSON-lines file per roll-out, every line synced before anything acts on it.

`<records>/<service>/<rollout id>.jsonl`: a worker, the guard or the next run finds there what a killed run left. One
live run per endpoint is kept by a file lock, which dies with its process. A record that cannot be read is set aside and
refuses its own endpoint alone. A line's meaning: `tuneship/gates/record.py`.
"""

import fcntl
import hashlib
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import (
    Begun,
    Ended,
    Fact,
    Record,
    SplitIntended,
    from_lines,
    readable_facts,
    to_line,
)

NOT_THE_END = ("paused", "rollback_incomplete")
"""Outcomes that leave a record open: a pause, and a return that was not confirmed."""


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
        """Nobody has ended it for good."""
        ended = [fact for fact in self.record.facts if isinstance(fact, Ended)]
        return not ended or ended[-1].outcome in NOT_THE_END

    @property
    def is_paused(self) -> bool:
        """Frozen for a person."""
        last = self.record.facts[-1] if self.record.facts else None
        return isinstance(last, Ended) and last.outcome == "paused"

    @property
    def may_have_moved(self) -> bool:
        """Open, and the candidate may have traffic: a killed run may have intended what it never confirmed."""
        return self.is_open and any(isinstance(fact, SplitIntended) for fact in self.record.facts)


@dataclass(frozen=True)
class Damaged:
    """A record of which not every line can be read."""

    path: Path
    begun: Begun | None
    """Whose record it is, where that line can be read."""
    is_over: bool
    """Its last line can be read and says that it ended for good."""

    def blocks(self, plan: CanaryPlan, endpoint_id: str | None = None) -> bool:
        """Whether it may have moved traffic of the plan's endpoint (by name, or by its id where that is known)."""
        if self.begun is None or self.is_over:
            return False
        if self.begun.endpoint_id in (plan.endpoint_id, endpoint_id):
            return True
        name = self.begun.plan.get("endpoint_name")
        return name is not None and name == plan.endpoint_name


class RecordFolder:
    """The records of one service."""

    def __init__(self, root: Path, service: str) -> None:
        """Name the folder after the service (its address, or its data directory), readable for people."""
        address = re.sub(r"^https?://", "", service)
        self.path = root.expanduser() / re.sub(r"[^A-Za-z0-9.]+", "-", address).strip("-")

    def of(self, plan: CanaryPlan) -> list[RecordFile]:
        """The records of this endpoint and pair that can be read, in the order in which they began."""
        files = [file for path in self.paths() if isinstance(file := _read(path), RecordFile)]
        return [file for file in files if file.record.facts and _concerns(file.record, plan)]

    def damaged(self) -> list[Damaged]:
        """The records that `of` leaves out."""
        return [file for path in self.paths() if isinstance(file := _read(path), Damaged)]

    def paths(self) -> list[Path]:
        """The file of every roll-out of this service, whatever its state."""
        return sorted(self.path.glob("*.jsonl"))

    def file(self, rollout_id: str) -> RecordFile:
        """The record of that id as the disk has it now. Raises ValueError for a damaged one."""
        return RecordFile(self.path / f"{rollout_id}.jsonl")

    def new(self, plan: CanaryPlan) -> RecordFile:
        """The next record of this endpoint and pair.

        The roll-out's id is the same until its first line is written, so that a create that is repeated after a crash
        carries the same idempotency key.
        """
        number = len(self.of(plan)) + 1
        endpoint = plan.endpoint_id or plan.endpoint_name
        text = f"{endpoint}|{plan.baseline_deployment_id}|{plan.candidate_deployment_id}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        taken = {file.path.stem for file in self.damaged()}
        while (name := f"rollout-{digest}-{number:04d}") in taken:
            number += 1
        return RecordFile(self.path / f"{name}.jsonl")

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


def _read(path: Path) -> RecordFile | Damaged:
    try:
        file = RecordFile(path)
        if not file.record.facts or CanaryPlan.model_validate(file.record.begun.plan):
            return file
    except ValueError:  # a line, a character, the first fact or the plan in it
        pass
    facts = readable_facts(path.read_bytes().decode(errors="replace").splitlines())
    begun = next((fact for fact in facts if isinstance(fact, Begun)), None)
    last = facts[-1] if facts else None
    is_over = isinstance(last, Ended) and last.outcome not in NOT_THE_END
    return Damaged(path, begun, is_over)


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
