"""Turns what pydantic refuses into the contract's errors: names and limits, never the value that was sent."""

import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from tuneship.contract.errors import (
    ApiError,
    ErrorDetail,
    InvalidRequestError,
    ValidationRefused,
)

DECLARED_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Parts of a place that name a branch of a union, not a field.
BRANCHES = {"int", "float", "str", "constrained-int", "constrained-float", "function-after"}
# Problems that an answer names: a body may have thousands, and nobody reads them.
REPORTED = 100
# Objects whose keys are the caller's own words, so they are not echoed.
FREE_KEYS = {"tags"}
# So many ids are listed in a refusal.
IDS_NAMED = 10
OUT_OF_RANGE = {
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "too_short",
    "too_long",
    "string_too_short",
    "string_too_long",
}


def place(parts: Iterable[int | str], *, known: bool = True) -> str | None:
    """`members[0].id`; ends at the parent of a name that the caller invented."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part in BRANCHES or not DECLARED_NAME.fullmatch(part):
            break
        else:
            text += f".{part}" if text else part
            if part in FREE_KEYS and known:
                break
    return text or None


def _message(one: Any) -> str:
    text = str(one["msg"]).removeprefix("Value error, ")
    text = re.sub(r"^(Input|String|List|Dictionary|Value) should ", "must ", text)
    return text.replace("must be a valid", "must be a")


def _code(kind: str) -> str:
    if kind in OUT_OF_RANGE:
        return "out_of_range"
    return "wrong_type" if kind.endswith("_type") else "invalid_value"


def refusal(error: ValidationError) -> ApiError:
    """The first class of problem decides: what cannot be read (400) comes before what is refused (422)."""
    problems = error.errors(include_url=False, include_input=False)
    missing = [one for one in problems if one["type"] == "missing"]
    unknown = [one for one in problems if one["type"] == "extra_forbidden"]
    if unknown:
        return _malformed(unknown, "unknown_field", "is not a field of this request")
    if missing:
        return _malformed(missing, "missing_field", "is required")
    details: dict[str | None, ErrorDetail] = {}
    for one in problems:
        named = one.get("ctx", {}).get("param") or place(one["loc"])
        details.setdefault(named, ErrorDetail(named, _code(one["type"]), _message(one)))
    first = next(iter(details.values()))
    return ValidationRefused(
        f"{first.field or 'the request'} {first.message}",
        param=first.field,
        details=list(details.values())[:REPORTED],
    )


def _malformed(problems: list[Any], code: str, message: str) -> InvalidRequestError:
    details = [
        ErrorDetail(
            one.get("ctx", {}).get("param") or place(one["loc"], known=code != "unknown_field"),
            code,
            message,
        )
        for one in problems[:REPORTED]
    ]
    first = details[0]
    return InvalidRequestError(
        f"{first.field or 'a name in the request'} {message}", param=first.field, details=details
    )


def refused(field: str, message: str, code: str = "invalid_value") -> ValidationRefused:
    """One field refused by a rule that needs more than the field itself."""
    return ValidationRefused(
        f"{field} {message}", param=field, details=[ErrorDetail(field, code, message)]
    )


def refuse_times_out_of_range(**moments: datetime | None) -> None:
    """Raises `ValidationRefused` for a moment that cannot be moved to UTC, by its parameter's name."""
    for name, moment in moments.items():
        if moment is not None and not 1970 < moment.year < 9999:
            raise refused(name, "must lie after 1970 and before 9999")


def abbreviated(identifiers: Sequence[str]) -> str:
    """What a refusal lists: the first ten, and how many more there are."""
    rest = len(identifiers) - IDS_NAMED
    return ", ".join(identifiers[:IDS_NAMED]) + (f" and {rest} more" if rest > 0 else "")
