"""Turns pydantic's errors into those of the contract: with names and limits, never the sent value."""

import re
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from pydantic import ValidationError

from tuneship.contract.errors import (
    ApiError,
    ErrorDetail,
    InvalidRequestError,
    ValidationFailed,
)

DECLARED_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
# Parts of pydantic's locations that name a branch of a union, not a field. Those that the contract names begin with
# TAG, and more of the field's path follows them; the others end it.
TAG = "~"
BRANCHES = {"int", "float", "str", "constrained-int", "constrained-float", "function-after"}
# Problems that one answer lists: a body may have thousands.
MAX_DETAILS = 100
# Objects whose keys are the caller's own words, so they are not echoed.
FREE_KEYS = {"tags", "metadata"}
# Ids that one message lists.
IDS_NAMED = 10
# Codes of fields and values that are known, and not supported here.
NOT_SUPPORTED = {"unsupported_parameter", "unsupported_value"}
# Kinds of problems of the contract's own validators that are codes, too.
CODES = NOT_SUPPORTED | {"conflict", "out_of_range"}
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


def field_path(parts: Iterable[int | str], *, known: bool = True) -> str | None:
    """The path of a field, such as `members[0].id`; an invented name is left off its end."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.startswith(TAG):
            continue
        elif part in BRANCHES or not DECLARED_NAME.fullmatch(part):
            break
        else:
            text += f".{part}" if text else part
            if part in FREE_KEYS and known:
                break
    return text or None


def _field(problem: Any, *, known: bool = True) -> str | None:
    """The field of a problem: its own path, or one that a validator names, whole or `below` that path."""
    named = problem.get("ctx", {})
    path = named.get("param") or field_path(problem["loc"], known=known) or ""
    return (path + named.get("below", "")).removeprefix(".") or None


def error_from_pydantic(error: ValidationError) -> ApiError:
    """The API's error for pydantic's: a request that cannot be read (400) comes before a refused value (422)."""
    problems = error.errors(include_url=False, include_input=False)
    missing = [problem for problem in problems if problem["type"] == "missing"]
    unknown = [problem for problem in problems if problem["type"] == "extra_forbidden"]
    if unknown:
        return _malformed(unknown, "unknown_field", "is not a field of this request")
    if missing:
        return _malformed(missing, "missing_field", "is required")
    # Of a text or a list, what is not supported in the list says more than that it is no text.
    problems.sort(key=lambda problem: problem["type"] not in NOT_SUPPORTED)
    details: dict[str | None, ErrorDetail] = {}
    for problem in problems:
        field, kind = _field(problem), problem["type"]
        # pydantic writes "Input should be ...": the API's messages begin with "must".
        text = str(problem["msg"]).removeprefix("Value error, ")
        text = re.sub(r"^(Input|String|List|Dictionary|Value) should ", "must ", text)
        text = re.sub("must be a valid (?=integer)", "must be an ", text)
        text = text.replace("must be a valid", "must be a")
        code = "wrong_type" if kind.endswith("_type") else "invalid_value"
        if kind in CODES:
            code = kind
        elif kind in OUT_OF_RANGE:
            code = "out_of_range"
        details.setdefault(field, ErrorDetail(field, code, text))
    first = next(iter(details.values()))
    return ValidationFailed(
        f"{first.field or 'the request'} {first.message}",
        param=first.field,
        details=list(details.values())[:MAX_DETAILS],
    )


def _malformed(problems: list[Any], code: str, message: str) -> InvalidRequestError:
    is_known = code != "unknown_field"
    details = [
        ErrorDetail(
            _field(problem, known=is_known),
            code,
            message,
        )
        for problem in problems[:MAX_DETAILS]
    ]
    first = details[0]
    return InvalidRequestError(
        f"{first.field or 'a name in the request'} {message}", param=first.field, details=details
    )


def field_error(field: str, message: str, code: str = "invalid_value") -> ValidationFailed:
    """The error for a value that is refused by a rule which needs more than the field itself."""
    return ValidationFailed(
        f"{field} {message}", param=field, details=[ErrorDetail(field, code, message)]
    )


def refuse_times_out_of_range(**moments: datetime | None) -> None:
    """Raises `ValidationFailed` for a moment that cannot be converted to UTC; `moments` are by parameter name."""
    for name, moment in moments.items():
        if moment is not None and not 1970 < moment.year < 9999:
            raise field_error(name, "must lie after 1970 and before 9999")


def abbreviated(identifiers: Sequence[str]) -> str:
    """The first ten ids for a message, and the number of the others."""
    rest = len(identifiers) - IDS_NAMED
    return ", ".join(identifiers[:IDS_NAMED]) + (f" and {rest} more" if rest > 0 else "")


@contextmanager
def with_names(names: Mapping[str, str]) -> Generator[None]:
    """Refuse fields by other names: `names` holds these by the main API's.

    A name stands for what is below it, too, unless that has a name of its own.
    """
    try:
        yield
    except ApiError as error:
        param = error.param or ""
        for name in sorted(names, key=len, reverse=True):
            if param == name or param.startswith((f"{name}.", f"{name}[")):
                error.param = names[name] + param.removeprefix(name)
                if error.message.startswith(f"{param} "):
                    error.message = error.param + error.message.removeprefix(param)
                error.details = ()
                break
        raise
