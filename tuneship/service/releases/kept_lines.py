"""Keeps of a line of a pipeline's record the known fields of known kinds, each in its known form.

Numbers, times, ids and words of tuneship pass; anything else is left out, and a line that cannot be read as its kind
keeps its kind and time only, like one of a newer pipeline. Pure. Next: `release_state.py` folds lines into the row.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import isfinite
from typing import Annotated, Any, cast

from pydantic import AwareDatetime, BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from tuneship.contract.common import READS_AS_WRITTEN
from tuneship.gates.record import Fact

# A word of tuneship (also `not_proven:error`), a gate such as `T8 enough data`, an id, a version, a UUID or a digest.
_WORD = re.compile(
    r"[A-Za-z0-9_-]{1,128}(?::[a-z0-9_]{1,64})?|roll back|T[0-9]{1,2} [a-z ]{1,32}|[0-9.]{1,16}"
)
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]{5,15}(?:Z|[+-]\d\d:\d\d)")
# Fields of any depth that hold a path of the pipeline's machine, or packed data that no page reads.
_LEFT_OUT = frozenset({"prompts", "kept"})
# The longest stored line, as JSON: a look has about 5 KB.
LONGEST = 32_768

# A clock is never so wrong, and a time near the ends of the calendar cannot be shown in another zone.
FIRST, LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)

Word = Annotated[str, Field(pattern=f"^(?:{_WORD.pattern})$")]
PersonName = Annotated[str, Field(max_length=200, pattern=READS_AS_WRITTEN)]
Comment = Annotated[str, Field(max_length=2000)]
Count = Annotated[int, Field(ge=0, le=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Moment = Annotated[AwareDatetime, Field(ge=FIRST, le=LAST)]


class _Gate(BaseModel):
    """A gate before any traffic, with its value beside its limit."""

    name: Word
    state: Word
    value: Number | None = None
    limit: Number | None = None


class _SignedIn(BaseModel):
    """The person who decided, where the service knew who had signed in."""

    issuer: Annotated[str, Field(max_length=2048, pattern="^https?://[!-~]+$")]
    subject: Annotated[str, Field(max_length=255, pattern="^[ -~]+$")]
    name: PersonName


# The fields of each kind of line in a release's own record, and their forms. Each line also has its time, `at`.
_OWN_KINDS: Mapping[str, Mapping[str, Any]] = {
    "begun": {"flow_run_id": Word, "endpoint_id": Word},
    "release": {"digest": Word},
    "data": {
        "dataset_id": Word,
        "validation_dataset_id": Word,
        "held_out_dataset_id": Word,
        "training_examples": Count,
        "validation_examples": Count,
        "duplicates": Count,
    },
    "job": {"id": Word},
    "trained": {"id": Word},
    "training_gates": {"decision": Word, "reason": Word, "gates": list[_Gate]},
    "question": {"question": Word, "asks": list[Word], "until": Moment},
    "held_gates": {
        "question": Word,
        "decision": Word,
        "approver": PersonName,
        "comment": Comment,
        "person": _SignedIn | None,
    },
    "baseline": {"id": Word},
    "candidate": {"id": Word},
    "smoke_test": {"gates": list[_Gate]},
    "evaluation": {
        "id": Word,
        "verdict": Word,
        "examples": dict[Word, Count],
        "gates": list[_Gate],
    },
    "rollout": {"gates": list[_Gate]},
    "ended": {"outcome": Word, "reason": Word},
    "model_card": {"sha256": Word},
}
_OWN = {
    kind: {
        name: TypeAdapter[Any](cast("Any", form)) for name, form in {"at": Moment, **fields}.items()
    }
    for kind, fields in _OWN_KINDS.items()
}
_FACT: TypeAdapter[Fact] = TypeAdapter(Annotated[Fact, Field(discriminator="kind")])
_PEOPLE = {
    "approver": TypeAdapter[str](PersonName),
    "by": TypeAdapter[str](PersonName),
    "comment": TypeAdapter[str](Comment),
    "person": TypeAdapter[_SignedIn | None](_SignedIn | None),
}


def is_of_rollout(record: str) -> bool:
    """Whether a record is one of a rollout, by its name."""
    return record.startswith("rollout-")


def kept_line(record: str, line: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a line that is stored."""
    kept = _of_rollout(line) if is_of_rollout(record) else _of_release(line)
    return kept if len(to_json(kept)) <= LONGEST else _unread(line)


def without_comment(line: dict[str, Any]) -> dict[str, Any]:
    """A line without a person's own text; a name is none."""
    return {**line, "comment": ""} if "comment" in line else line


def _of_release(line: Mapping[str, Any]) -> dict[str, Any]:
    kind = line.get("kind")
    fields = _OWN.get(kind) if isinstance(kind, str) else None
    if fields is None:
        return _unread(line)
    return {"kind": kind, **_fitting(fields, line)}


def _of_rollout(line: Mapping[str, Any]) -> dict[str, Any]:
    try:
        fact = _FACT.validate_python(line)
    except ValidationError:
        return _unread(line)
    if not _is_usable(_FACT.dump_python(fact)):
        return _unread(line)
    kept: dict[str, Any] = _plain(_FACT.dump_python(fact, mode="json"))
    people = {name: _PEOPLE[name] for name in _PEOPLE if name in kept}
    # A person without a readable part is none.
    blank = {"person": None} if "person" in kept else {}
    return {**kept, **blank, **_fitting(people, line)}


def _is_usable(value: Any) -> bool:
    """Whether every number of a fact is finite, and every time has a zone and lies in our days."""
    if isinstance(value, dict):
        return all(map(_is_usable, cast("dict[Any, Any]", value).values()))
    if isinstance(value, list | tuple):
        return all(map(_is_usable, cast("Sequence[Any]", value)))
    if isinstance(value, datetime):
        return value.tzinfo is not None and FIRST <= value <= LAST
    return not isinstance(value, float) or isfinite(value)


def _unread(line: Mapping[str, Any]) -> dict[str, Any]:
    """The kind and time of a line. Its kind is marked: it may be a known one with values that are not."""
    found = _fitting({"kind": TypeAdapter(Word), "at": TypeAdapter(Moment)}, line)
    return {**found, "kind": f"unread:{found.get('kind', '')}"}


def _fitting(fields: Mapping[str, TypeAdapter[Any]], line: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a line that have their form, as JSON values."""
    found: dict[str, Any] = {}
    for name, form in fields.items():
        try:
            found[name] = form.dump_python(form.validate_python(line[name]), mode="json")
        except (KeyError, ValidationError):
            continue
    return found


def _plain(value: Any) -> Any:
    """The value with each text blanked that is no word, id or time."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {
            key: "" if key in _LEFT_OUT else _plain(one)
            for key, one in items
            if _WORD.fullmatch(key)
        }
    if isinstance(value, list):
        plain = [_plain(one) for one in cast("list[Any]", value)]
        return [one for one in plain if one != ""]
    if isinstance(value, str):
        return value if _WORD.fullmatch(value) or _TIME.fullmatch(value) else ""
    return value
