"""Rollout records on disk: one append-only JSON-lines file per rollout, every line synced before anything acts on it.

A worker, the guard or the next run finds in `<records>/<service>/<rollout id>.jsonl` what a killed run left. A file
lock, which dies with its process, allows one live run per endpoint. A record that cannot be read is set aside and
blocks only its own endpoint. The facts are those of `tuneship/gates/record.py`.
"""

import hashlib
import re
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flows.shared.journal import FileLock, Journal, damage_of
from flows.shared.release_events import publish
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import (
    Begun,
    ChangedLine,
    Ended,
    Fact,
    RolloutRecord,
    SplitIntended,
    from_lines,
    linked,
    readable_facts,
    to_line,
)
from tuneship.prefect.connection import service_name
from tuneship.settings import PipelineSettings

# Outcomes that leave a record open: a pause, and a return that was not confirmed.
NOT_THE_END = ("paused", "rollback_incomplete")


class RecordFile:
    """One rollout's record: the facts in memory are on the disk, unless `unwritten` says otherwise."""

    def __init__(self, path: Path) -> None:
        """Read the file; its folder is created with the first line. Raises OSError, and ValueError for damage."""
        self._journal = Journal(path, linked, publish)
        self.record: RolloutRecord = from_lines(line.decode() for line in self._journal.lines)

    @property
    def path(self) -> Path:
        """The record's file."""
        return self._journal.path

    def append(self, *facts: Fact) -> None:
        """Add facts and return when the disk has them. Raises `NotWritten`."""
        self._journal.append(*map(to_line, facts))
        self.record = self.record.plus(*facts)

    def append_if_possible(self, *facts: Fact) -> None:
        """Add facts that are true even if the disk refuses them, such as those of a rollback.

        The next append tries them again.
        """
        self._journal.append_if_possible(*map(to_line, facts))
        self.record = self.record.plus(*facts)

    @property
    def unwritten(self) -> list[str]:
        """A note for the result if lines are missing on the disk, and why; else empty."""
        note = self._journal.unwritten
        return [note] if note else []

    @property
    def is_open(self) -> bool:
        """Whether the rollout may go on: it has not ended, or is paused, or its rollback is unconfirmed."""
        ended = [fact for fact in self.record.facts if isinstance(fact, Ended)]
        return not ended or ended[-1].outcome in NOT_THE_END

    @property
    def is_paused(self) -> bool:
        """Whether the rollout is paused for a person."""
        last = self.record.facts[-1] if self.record.facts else None
        return isinstance(last, Ended) and last.outcome == "paused"

    @property
    def may_have_traffic(self) -> bool:
        """Whether the rollout is open and its candidate may have traffic, confirmed or only intended."""
        return self.is_open and any(isinstance(fact, SplitIntended) for fact in self.record.facts)


@dataclass(frozen=True)
class Damaged:
    """A record with lines that cannot be read."""

    path: Path
    # For people: the lines that cannot be read, or the reason why the file cannot be opened.
    why: str
    # The first fact, where its line can be read.
    begun: Begun | None
    # Whether its last line can be read and ends the rollout for good.
    is_over: bool

    def blocks(self, plan: CanaryPlan, endpoint_id: str | None = None) -> bool:
        """Whether its rollout may have moved traffic of the plan's endpoint, known by its name or its id."""
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
        """The readable records of this endpoint and pair, in the order in which they began."""
        files = [file for path in self.paths() if isinstance(file := read_record(path), RecordFile)]
        pair = (plan.baseline_deployment_id, plan.candidate_deployment_id)
        # A plan that names no id knows its endpoint by name, which a record keeps in its plan.
        by_id = plan.endpoint_id is not None
        endpoint = plan.endpoint_id if by_id else plan.endpoint_name

        found: list[RecordFile] = []
        for file in files:
            if not file.record.facts:
                continue
            begun = file.record.begun
            theirs = begun.plan["baseline_deployment_id"], begun.plan["candidate_deployment_id"]
            name = begun.endpoint_id if by_id else begun.plan.get("endpoint_name")
            if theirs == pair and name == endpoint:
                found.append(file)
        return found

    def damaged(self) -> list[Damaged]:
        """The records that cannot be read."""
        return [file for path in self.paths() if isinstance(file := read_record(path), Damaged)]

    def paths(self) -> list[Path]:
        """The files of all rollouts of this service. Raises OSError for an unreadable folder."""
        with suppress(FileNotFoundError):
            return sorted(path for path in self.path.iterdir() if path.suffix == ".jsonl")
        return []

    def file(self, rollout_id: str) -> RecordFile:
        """Read the record of that id. Raises ValueError for a damaged one, and OSError."""
        files = [path for path in self.paths() if path.stem == rollout_id]
        return RecordFile(files[-1] if files else self.path / f"{rollout_id}.jsonl")

    def new(self, plan: CanaryPlan) -> RecordFile:
        """Name the next record of this endpoint and pair.

        The rollout's id is the same until its first line is written, so that a create that is repeated after a crash
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
        """Lock the endpoint for this process; False if another live run on this host holds the lock.

        One plan may name the endpoint by its id, another by its name, so both are locked as far as they are known.
        """
        given = plan.endpoint_id or plan.endpoint_name
        names = {given}
        # `lstat`: a link that leads nowhere is a damaged record, and stops nobody.
        for path in sorted(self.paths(), key=lambda path: path.lstat().st_mtime, reverse=True):
            file = read_record(path)
            if isinstance(file, Damaged) or not file.record.facts:
                continue
            begun = file.record.begun
            known = {begun.endpoint_id, begun.endpoint_name or begun.plan.get("endpoint_name")}
            if given in known and None not in known:
                names = known
                break

        # Every process takes them in one order, so that two of them do not keep each other out.
        keys = [hashlib.sha256(name.encode()).hexdigest()[:16] for name in sorted(map(str, names))]
        locks = [FileLock(self.path / f"{key}.lock") for key in keys]
        try:
            yield all(lock.take() for lock in locks)
        finally:
            for lock in locks:
                lock.release()


def records_in_use() -> RecordFolder:
    """The records of the service that this process works with."""
    return RecordFolder(PipelineSettings().records, service_name())


def read_record(path: Path) -> RecordFile | Damaged:
    """Read the record in a file, or say why it cannot be read."""
    try:
        file = RecordFile(path)
        if not file.record.facts or CanaryPlan.model_validate(file.record.begun.plan):
            return file
        fault: ValueError | None = None
    except OSError as error:
        return Damaged(path, f"the record {path} cannot be read ({error.strerror})", None, False)
    except ValueError as error:  # a line, a character, the first fact or the plan in it
        fault = error
    facts, numbers = Journal(path).read(_fact)
    begun = next((fact for fact in facts if isinstance(fact, Begun)), None)
    last = facts[-1] if facts else None
    is_over = isinstance(last, Ended) and last.outcome not in NOT_THE_END
    is_changed = isinstance(fault, ChangedLine)
    why = f"the record {path}: {fault}" if is_changed else damage_of(path, numbers or [1])
    return Damaged(path, why, begun, is_over and not is_changed)


def _fact(line: bytes) -> Fact | None:
    with suppress(ValueError, RecursionError):
        return next(iter(readable_facts([line.decode()])), None)
    return None
