"""Injected faults of a deployment, from its tags, for tests, drills and the demo.

`fault.error_rate` and `fault.empty_rate` are shares "0".."1", `fault.delay_ms` milliseconds. They work only when the
service was started with `--allow-fault-injection`; otherwise they are plain tags.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tuneship.service.refusals import refused

LONGEST_DELAY_MS = 60_000.0


@dataclass(frozen=True)
class Faults:
    """What to break."""

    error_rate: float = 0.0
    empty_rate: float = 0.0
    delay_ms: float = 0.0


NO_FAULTS = Faults()


def faults_of(tags: Mapping[str, str], *, allowed: bool) -> Faults:
    """Read the tags. Raises `ValidationRefused` for a bad value where injection is allowed."""
    if not allowed:
        return NO_FAULTS
    return Faults(
        error_rate=_number(tags, "fault.error_rate", 1.0),
        empty_rate=_number(tags, "fault.empty_rate", 1.0),
        delay_ms=_number(tags, "fault.delay_ms", LONGEST_DELAY_MS),
    )


def _number(tags: Mapping[str, str], name: str, most: float) -> float:
    text = tags.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise refused("tags", f"{name} must be a number from 0 to {most:g}")
    return value
