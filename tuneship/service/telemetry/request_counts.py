"""Counts answered requests by tenant and operation, for the metrics of the service. Kept in memory since the start."""

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

# Upper edges of the histogram of durations, in seconds; one more cell counts the longer ones.
EDGES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
# The tenant of requests without a valid key.
NO_CLIENT = ""
# The operation of requests that reached none: refused before, or answered by a health check.
NO_OPERATION = "none"


@dataclass
class RequestTally:
    """The answers to one operation. `statuses` has the number of answers by class, e.g. `2xx`."""

    statuses: Counter[str] = field(default_factory=Counter[str])
    # Answers by duration, each in the first cell whose edge it does not exceed.
    cells: list[int] = field(default_factory=lambda: [0] * (len(EDGES_S) + 1))
    seconds: float = 0.0


class RequestCounts:
    """The tallies by tenant and operation. Counted on the event loop, read from any thread."""

    def __init__(self) -> None:
        """Start with none."""
        self._tallies: dict[tuple[str, str], RequestTally] = {}

    def count(self, client_id: str, operation: str, status: int, seconds: float) -> None:
        """Count one answer; a `status` of 0 is a connection that ended before its answer began."""
        tally = self._tallies.get((client_id, operation))
        if tally is None:
            tally = self._tallies[client_id, operation] = RequestTally()
        tally.statuses[f"{status // 100}xx" if status else "none"] += 1
        tally.cells[bisect_left(EDGES_S, seconds)] += 1
        tally.seconds += seconds

    def by_operation(self, client_id: str | None) -> dict[str, RequestTally]:
        """Copies of the tallies of one tenant, or of all tenants together (None)."""
        found: dict[str, RequestTally] = {}
        # `list` copies in one step of the interpreter, so no lock is needed.
        for (client, operation), tally in list(self._tallies.items()):
            if client_id in (None, client):
                total = found.setdefault(operation, RequestTally())
                total.statuses.update(dict(tally.statuses))
                total.cells = [a + b for a, b in zip(total.cells, list(tally.cells), strict=True)]
                total.seconds += tally.seconds
        return found
