"""Injected faults of a deployment, from its tags, for tests, drills and the demo.

`fault.delay_ms` is milliseconds, the others are shares "0".."1" of the requests: `fault.error_rate` fail,
`fault.empty_rate` get an empty answer, `fault.hang` hang until the caller disconnects or the timeout, `fault.refuse`
are refused like prompts that are too long (the longest ones), `fault.short` are cut to a fifth of their words. They
work only when the service was started with `--allow-fault-injection` (`generation/drills.py`); otherwise they are plain
tags.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tuneship.service.answers.field_errors import field_error

LONGEST_DELAY_MS = 60_000.0


@dataclass(frozen=True)
class Faults:
    """The faults of one deployment: shares of its requests, and a delay."""

    error_rate: float
    empty_rate: float
    delay_ms: float
    hang: float
    refuse: float
    short: float


def faults_of(tags: Mapping[str, str]) -> Faults:
    """Read the tags. Raises `ValidationFailed` for a bad value."""
    return Faults(
        error_rate=_number(tags, "fault.error_rate", 1.0),
        empty_rate=_number(tags, "fault.empty_rate", 1.0),
        delay_ms=_number(tags, "fault.delay_ms", LONGEST_DELAY_MS),
        hang=_number(tags, "fault.hang", 1.0),
        refuse=_number(tags, "fault.refuse", 1.0),
        short=_number(tags, "fault.short", 1.0),
    )


def _number(tags: Mapping[str, str], name: str, most: float) -> float:
    text = tags.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise field_error("tags", f"{name} must be a number from 0 to {most:g}")
    return value
