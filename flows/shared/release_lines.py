"""The records of the pipeline as the service's releases take them: names, announcements, and the lines that may leave.

No path of this machine and no text that a person wrote leaves it. Next: `flows/shared/release_events.py` sends.
"""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from tuneship.contract.releases import MAX_LINES, ReleaseCreate

RELEASES = "releases"
# Of a request, which the service takes up to 1 MiB; the rest is left to what stands around the lines.
MAX_BYTES = 1_000_000
_GATE = ("name", "state", "value", "limit")
# The fields of each kind of line in a release's own record that are sent, beside its kind and time.
_OWN_FIELDS = {
    "begun": ("flow_run_id", "endpoint_id"),
    "release": ("digest",),
    "data": (
        *("dataset_id", "validation_dataset_id"),
        *("training_examples", "validation_examples", "duplicates"),
    ),
    "job": ("id",),
    "trained": ("id",),
    "training_gates": ("decision", "reason", "gates"),
    "question": ("question", "asks", "until"),
    "held_gates": ("question", "decision", "approver", "person"),
    "baseline": ("id",),
    "candidate": ("id",),
    "smoke_test": ("gates",),
    "evaluation": ("id", "verdict", "examples", "gates"),
    "rollout": ("gates",),
    "ended": ("outcome", "reason"),
    "model_card": ("sha256",),
}
# A line that cannot be read, or is too long, keeps its place: the lines behind it would have none.
_UNREADABLE = {"kind": "unreadable"}


def name_of(path: Path, first: bytes) -> str:
    """The name of a record: two of one file name, e.g. of two machines, differ in their first lines."""
    return f"{path.stem}-{hashlib.sha256(first).hexdigest()[:8]}"


def batch(lines: Sequence[bytes]) -> Sequence[bytes]:
    """The first of these lines, as many as one request takes."""
    size = 0
    for place, line in enumerate(lines[:MAX_LINES]):
        size += len(line)
        if size > MAX_BYTES and place:
            return lines[:place]
    return lines[:MAX_LINES]


def sendable(path: Path, line: bytes) -> dict[str, Any]:
    """The part of a line that is sent."""
    fact = _fact(line) if len(line) <= MAX_BYTES else None
    if fact is None:
        return _UNREADABLE
    if path.parent.name == RELEASES:
        fields = ("kind", "at", *_OWN_FIELDS.get(fact["kind"], ()))
        fact = {name: fact[name] for name in fields if name in fact}
        if isinstance(gates := fact.get("gates"), list):
            gates = cast("list[dict[str, Any]]", gates)
            fact["gates"] = [{name: gate.get(name) for name in _GATE} for gate in gates]
        return fact
    # A person's text, and buckets that nobody but a replay reads.
    for name in ("comment", "kept"):
        fact.pop(name, None)
    traffic = fact.get("plan", {}).get("traffic")
    if traffic is not None:
        traffic["prompts"] = ""
    return fact


def announcement(path: Path, first: bytes) -> ReleaseCreate:
    """How the release of a record is announced. Raises ValueError for a record whose first line cannot be read."""
    begun = _fact(first)
    if path.parent.name != RELEASES and begun is not None:
        parent = _release_of_rollout(path, begun["plan"])
        if parent is None:
            return ReleaseCreate(
                run_key=name_of(path, first),
                kind="rollout",
                endpoint_id=begun["endpoint_id"],
                endpoint_name=begun.get("endpoint_name") or begun["plan"].get("endpoint_name"),
            )
        begun = parent
    if begun is None or begun["kind"] != "begun":
        raise ValueError("the record does not say how it began")
    return ReleaseCreate(
        run_key=begun["run_key"],
        kind="release",
        model_name=begun.get("model_name"),
        endpoint_id=begun["endpoint_id"],
        endpoint_name=begun["endpoint_name"],
        links=begun.get("links", {}),
    )


def _release_of_rollout(path: Path, plan: dict[str, Any]) -> dict[str, Any] | None:
    """The first line of the release that made a rollout's candidate; None for a rollout of its own."""
    pair = ("baseline_deployment_id", "candidate_deployment_id")
    found: dict[str, Any] | None = None
    for file in sorted((path.parent.parent / RELEASES).glob("*.jsonl")):
        with suppress(OSError):
            content = file.read_bytes()
            if plan[pair[1]].encode() not in content:
                continue
            facts = [fact for line in content.splitlines() if (fact := _fact(line)) is not None]
            plans = [fact.get("plan", {}) for fact in facts if fact["kind"] == "rollout"]
            if any(all(one.get(name) == plan[name] for name in pair) for one in plans):
                found = facts[0]
    return found


def _fact(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, KeyError, TypeError, RecursionError):
        # JSON has no NaN and no infinity, but a record's loss may be one.
        fact = json.loads(line, parse_constant=lambda _: None)
        if isinstance(fact["kind"], str):
            return fact
    return None
