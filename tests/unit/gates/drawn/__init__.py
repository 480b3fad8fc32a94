"""Rollouts on requests drawn one by one, decided by our gates and by rules of others.

`python -m tests.unit.gates.drawn --runs 60` prints the table of `docs/simulations.md`; `--row NAME` one row of it.
All draws come from the seeds that are named.
"""

from tests.unit.gates.drawn.kinds import KINDS, Kind
from tests.unit.gates.drawn.rules import (
    PUBLISHED,
    Run,
    argo,
    kayenta,
    roll_out,
    runs_of,
    share_wrong,
    watched,
)
from tests.unit.gates.drawn.worlds import EDGES, Behaviour, Minute, Service

__all__ = [
    "EDGES",
    "KINDS",
    "PUBLISHED",
    "Behaviour",
    "Kind",
    "Minute",
    "Run",
    "Service",
    "argo",
    "kayenta",
    "roll_out",
    "runs_of",
    "share_wrong",
    "watched",
]
