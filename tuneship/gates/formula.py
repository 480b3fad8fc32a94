"""How a release of this package judges: the version that decisions are recorded under.

A rollout is judged to its end, and replayed, by the formula of the version that began it. What version 2 changed:

- Latency limits are frozen from the last hour with traffic, and not from the first 200 answers.
- A request that has been open for long counts as slow before it ends.
- One caller's repeated failures in a bucket are one failure where a single bucket may decide.
- The first looks after an increase do not decide by their latency alone.
- Much shorter or longer answers hold even where blank answers are counted.
- The candidate's share of the counted requests is compared with its weight.
- What the cap on bursts cut off is used up before a fall of the evidence counts (`evidence.py`).

Next: `canary.py`.
"""

from tuneship.gates.record import Look, RolloutRecord

# Grows when the same counts may give another number or verdict; stored with every look.
FORMULA_VERSION = "2"
_KNOWN = {"1": 1, FORMULA_VERSION: 2}


def formula_of(record: RolloutRecord, look: Look | None = None) -> int:
    """The formula that the rollout began with, or that of a look which is decided again.

    Where neither `Begun` nor a look says it, that of this release. Raises ValueError for one that it does not know.
    """
    facts = (look,) if look else (record.begun, *record.looks[:1])
    version = next((one.formula_version for one in facts if one.formula_version), FORMULA_VERSION)
    if version not in _KNOWN:
        raise ValueError(f"this release cannot judge by formula version {version!r}")
    return _KNOWN[version]
