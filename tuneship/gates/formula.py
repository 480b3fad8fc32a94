"""How a release of this package judges: the version that decisions are recorded under, and what it changed.

A roll-out is judged to its end, and replayed, by the formula of the version that began it. Next: `canary.py`.
"""

from dataclasses import dataclass

from tuneship.gates.record import Record

FORMULA_VERSION = "2"
"""Grows when the same counts may give another number or verdict; stored with every look."""


@dataclass(frozen=True)
class Formula:
    """What one version does that an earlier one did not."""

    version: str
    freezes_last_hour: bool = True
    """Latency limits come from the last hour with traffic, and not from the first 200 answers."""
    counts_hanging: bool = True
    """A request that has been open for long counts as slow before it ends."""
    counts_callers: bool = True
    """One caller's repeated failures in a bucket are one failure where a single bucket may decide."""
    warms_up: bool = True
    """The first looks after an increase are not weighed for latency."""
    compares_length: bool = True
    """Much shorter or longer answers hold even where blank answers are counted."""
    checks_split: bool = True
    """The candidate's share of the counted requests is compared with its weight."""


_FIRST = Formula("1", *[False] * 6)
_NOW = Formula(FORMULA_VERSION)


def formula(version: str) -> Formula:
    """The formula of a version. Raises ValueError for a version that this release does not know."""
    if version == _FIRST.version:
        return _FIRST
    if version == _NOW.version:
        return _NOW
    raise ValueError(f"this release cannot judge by formula version {version!r}")


def formula_of(record: Record) -> Formula:
    """The formula that the roll-out began with; where neither `Begun` nor a look says it, that of this release."""
    versions = [record.begun.formula_version, *(look.formula_version for look in record.looks[:1])]
    return formula(next((version for version in versions if version), FORMULA_VERSION))
