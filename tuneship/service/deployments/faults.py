"""Injected faults of a deployment, from its tags, for tests, drills and the demo.

`fault.delay_ms` is milliseconds, the others are shares "0".."1" of the requests: `fault.error_rate` fail,
`fault.empty_rate` get an empty answer, `fault.hang` hang until the caller disconnects or the timeout, `fault.refuse`
are refused like prompts that are too long (the longest ones), `fault.short` are cut to a fifth of their words. They
work only when the service was started with `--allow-fault-injection`; otherwise they are plain tags.
"""

import random
import re
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from tuneship.service.common.refusals import refused

LONGEST_DELAY_MS = 60_000.0
# Earlier prompts of a deployment with which the length of a new one is compared.
PROMPTS_REMEMBERED = 200
# An answer that is cut keeps one of this many words.
KEPT_OF_WORDS = 5


@dataclass(frozen=True)
class Faults:
    """The faults of one deployment: shares of its requests, and a delay."""

    error_rate: float = 0.0
    empty_rate: float = 0.0
    delay_ms: float = 0.0
    hang: float = 0.0
    refuse: float = 0.0
    short: float = 0.0


NO_FAULTS = Faults()


def faults_of(tags: Mapping[str, str], *, allowed: bool) -> Faults:
    """Read the tags. Raises `ValidationRefused` for a bad value where injection is allowed."""
    if not allowed:
        return NO_FAULTS
    return Faults(
        error_rate=_number(tags, "fault.error_rate", 1.0),
        empty_rate=_number(tags, "fault.empty_rate", 1.0),
        delay_ms=_number(tags, "fault.delay_ms", LONGEST_DELAY_MS),
        hang=_number(tags, "fault.hang", 1.0),
        refuse=_number(tags, "fault.refuse", 1.0),
        short=_number(tags, "fault.short", 1.0),
    )


def drawn(share: float) -> bool:
    """Whether this request is in the share, drawn at random."""
    return random.random() < share  # noqa: S311 - a drill, not a secret


class PromptLengths:
    """The lengths of the latest prompts to deployments with `fault.refuse`. Lives on the event loop."""

    def __init__(self) -> None:
        """Start without prompts."""
        self._seen: defaultdict[str, deque[int]] = defaultdict(
            lambda: deque(maxlen=PROMPTS_REMEMBERED)
        )

    def is_among_longest(self, deployment_id: str, length: int, share: float) -> bool:
        """Whether this prompt is in the longest share of the latest ones; equal ones are drawn at random."""
        seen = self._seen[deployment_id]
        shorter = sum(earlier < length for earlier in seen)
        position = shorter + random.random() * (seen.count(length) + 1)  # noqa: S311 - a drill, not a secret
        rank = position / (len(seen) + 1)
        seen.append(length)
        return rank >= 1 - share


def shortened(text: str) -> tuple[str, float]:
    """The first fifth of the words, at least one, and its share of them."""
    words = list(re.finditer(r"\S+", text))
    if not words:
        return text, 1.0
    kept = max(1, len(words) // KEPT_OF_WORDS)
    return text[: words[kept - 1].end()], kept / len(words)


def _number(tags: Mapping[str, str], name: str, most: float) -> float:
    text = tags.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= most:
        raise refused("tags", f"{name} must be a number from 0 to {most:g}")
    return value
