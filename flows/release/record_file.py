"""The record of a release on disk, line by line: a repeated run resumes from it, and a clean-up finds its resources.

`<records>/releases/<run key>.jsonl`. It also shows which releases were rolled back lately, and gives the next run of
the same parameters a new key once this one has ended. Ids, digests and outcomes, never text of a dataset.
"""

import errno
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from types import UnionType
from typing import Any

from flows.shared.journal import FileLock, Journal, NotWritten, damage_of
from flows.shared.release_events import publish

# A release that was rolled back is not tried again for this long, unless forced.
REFUSED_FOR = timedelta(hours=24)


# The fields that a line of each kind must have. A kind that is not named here may hold anything.
_NEEDED: Mapping[str, Mapping[str, type | UnionType]] = {
    "begun": {"run_key": str, "endpoint_id": str | None, "endpoint_name": str | None},
    "job": {"id": str, "content": list},
    "candidate": {"id": str},
    "baseline": {"id": str},
    "release": {"digest": str},
    "question": {"question": str, "asks": list, "until": str},
    "rollout": {"plan": dict},
    "ended": {"outcome": str},
}
_ADVICE = ": see to its job and deployment, then move it away"


class DamagedRecord(Exception):
    """The record of a given run key has lines that cannot be read."""


class ReleaseRecord:
    """The record of one run of the chain."""

    def __init__(self, path: Path) -> None:
        """Read the file. Lines that cannot be read are named in `damage`."""
        self.path = path
        self.facts: list[dict[str, Any]] = []
        # The lines that cannot be read, for people; such a record is neither resumed nor cleaned up.
        self.damage = ""
        self._lock = FileLock(path.with_suffix(".lock"))
        self._journal: Journal | None = None
        try:
            self._journal = Journal(path, written=publish)
        except OSError as error:
            self.damage = f"the record {path} cannot be read ({error.strerror})" + _ADVICE
            return
        self.facts, damaged = self._journal.read(_read)
        if damaged:
            self.damage = damage_of(path, damaged) + _ADVICE

    @property
    def training_file(self) -> Path:
        """The file beside the record with what the training gates were decided from."""
        return self.path.with_suffix(".training.json")

    @property
    def parameters_file(self) -> Path:
        """The file beside the record with the release's parameters, for the model card of a run that was killed."""
        return self.path.with_suffix(".parameters.json")

    def hold(self) -> bool:
        """Lock this run for this process until it ends; False where another live process has it."""
        return self._lock.take()

    def release(self) -> None:
        """Release the lock, as the death of the process does."""
        self._lock.release()

    def add(self, kind: str, at: datetime, **fields: Any) -> None:
        """Append one line and return when the disk has it. Raises `NotWritten`."""
        fact = {"kind": kind, "at": at.isoformat(), **fields}
        # The disk comes first: nothing may act on a fact that a crash could take back.
        self._writable().append(json.dumps(fact))
        self.facts.append(fact)

    def add_if_possible(self, kind: str, at: datetime, **fields: Any) -> None:
        """Add a fact in memory even if writing it fails; `unwritten` reports the failure."""
        fact = {"kind": kind, "at": at.isoformat(), **fields}
        self._writable().append_if_possible(json.dumps(fact))
        self.facts.append(fact)

    @property
    def unwritten(self) -> list[str]:
        """A note for the result if lines are missing on the disk, and why; else empty."""
        note = self._journal.unwritten if self._journal else ""
        return [note] if note else []

    def _writable(self) -> Journal:
        if self._journal is None:
            raise NotWritten(errno.EIO, self.damage, str(self.path))
        return self._journal

    def last(self, kind: str) -> dict[str, Any] | None:
        """The newest line of a kind."""
        return next((fact for fact in reversed(self.facts) if fact["kind"] == kind), None)

    @property
    def run_key(self) -> str:
        """The key that makes every create of this run unique."""
        begun = self.last("begun")
        return str(begun["run_key"]) if begun else self.path.stem

    @property
    def has_ended(self) -> bool:
        """Whether the run is over. A killed run wrote no end; a pause and an unconfirmed rollback are not one."""
        ended = self.last("ended")
        return ended is not None and ended["outcome"] not in ("paused", "rollback_incomplete")

    def made(self, kind: str) -> str | None:
        """The id of the newest resource that this run created as `job`, `candidate` or `baseline`; None without one."""
        fact = self.last(kind)
        return fact["id"] if fact else None

    def all_made(self, kind: str) -> list[str]:
        """The ids of all resources of that kind, in order of their creation."""
        return [fact["id"] for fact in self.facts if fact["kind"] == kind]

    def open_question(self, asks: Sequence[str], now: datetime) -> tuple[str, datetime] | None:
        """The question about these gates that a killed run has asked, with its end; None where none is open."""
        asked = [fact for fact in self.facts if fact["kind"] in ("question", "held_gates")]
        last = asked[-1] if asked else {}
        until = last.get("until")
        if until is None or last["asks"] != list(asks) or datetime.fromisoformat(until) <= now:
            return None
        return last["question"], datetime.fromisoformat(until)

    def deployment_suffix(self, role: str) -> str:
        """The suffix of the name of this run's `candidate` or `baseline` deployment."""
        return hashlib.sha256(f"{self.run_key} {role}".encode()).hexdigest()[:8]

    def is_of_flow_run(self, flow_run_id: str) -> bool:
        """Whether this flow run, or one that it called, last wrote the record."""
        begun = self.last("begun") or {}
        return flow_run_id in (begun.get("flow_run_id"), begun.get("root_flow_run_id"))


class ReleaseRecords:
    """All records of this pipeline."""

    def __init__(self, records: Path) -> None:
        """Read and write below `<records>/releases`."""
        self.folder = records.expanduser() / "releases"

    def __iter__(self) -> Iterator[ReleaseRecord]:
        """Every record, by name."""
        return (ReleaseRecord(path) for path in sorted(self.folder.glob("*.jsonl")))

    def of(self, parameters_digest: str, run_key: str | None) -> ReleaseRecord:
        """The record to write: that of the given key, else the open one of these parameters, else the next.

        Damaged records are skipped; raises `DamagedRecord` where the one of the given key is damaged.
        """
        if run_key is not None:
            record = ReleaseRecord(self.folder / f"{_file_of(run_key)}.jsonl")
            if record.damage:
                raise DamagedRecord(record.damage)
            return record
        number = 1
        while True:
            record = ReleaseRecord(self.folder / f"{parameters_digest[:16]}-{number}.jsonl")
            if not record.has_ended and not record.damage:
                return record
            # A repeated run must not add to a record that has ended, nor to one whose lines may be missing.
            number += 1

    def of_flow_run(self, flow_run_id: str) -> ReleaseRecord | None:
        """The record that a flow run wrote."""
        return next((record for record in self if record.is_of_flow_run(flow_run_id)), None)

    def rolled_back_since(self, release_digest: str, now: datetime) -> datetime | None:
        """The time at which this release was rolled back in the last 24 hours; None if it was not."""
        for record in self:
            ended, made = record.last("ended"), record.last("release")
            if ended is None or made is None or ended["outcome"] != "rolled_back":
                continue
            at = datetime.fromisoformat(ended["at"])
            if made["digest"] == release_digest and now - at < REFUSED_FOR:
                return at
        return None


def _read(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None where it is not a fact, or lacks a field that its kind needs."""
    try:
        fact: Any = json.loads(line)
        is_dated = datetime.fromisoformat(fact["at"]).tzinfo is not None
        needed = _NEEDED.get(fact["kind"], {})
        is_whole = all(isinstance(fact[name], kind) for name, kind in needed.items())
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return fact if is_dated and is_whole else None


def _file_of(run_key: str) -> str:
    """The file name of a given key, which may hold any character."""
    return f"key-{hashlib.sha256(run_key.encode()).hexdigest()[:16]}"
