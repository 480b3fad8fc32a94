"""Checks that the candidate's counted requests are as many as its weight promises; the rest was counted nowhere.

Only for requests that are drawn one by one: callers with routing keys come in lumps. Pure. Next: `view.py`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise

from tuneship.gates.metrics.series import ArmTraffic, Bucket, first_after
from tuneship.gates.record import Mark
from tuneship.gates.statistics.evidence import log_sum_exp

# Share of the candidate's requests that may be missing.
TOLERANCE_SHARE = 0.02
# Without any loss, at most one rollout in a hundred is ever held for this (Ville).
LOG_MISMATCH = math.log(100.0)
# Where each request has a key of its own, half of the callers make half of the requests.
ONE_BY_ONE_SHARE = 0.45
# Alternatives that the mixture bets on: the true loss is not known, and one of these is near it.
_LOSSES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.8)


@dataclass(frozen=True)
class Drawn:
    """Requests of one bucket, and the candidate's weight in percent while they were drawn."""

    candidate: int
    baseline: int
    weight: int


def drawn_requests(
    buckets: Sequence[Bucket], marks: dict[int, Mark], settled_after: timedelta
) -> list[Drawn] | None:
    """Keep the buckets served at one weight throughout; None where the server does not count all requests.

    Requests of the weight before end in the first bucket of a step, and as long as a slow answer takes.
    """
    found: list[Drawn] = []
    starts: list[tuple[int, datetime | None]] = [(w, mark.at) for w, mark in marks.items()]
    for (weight, at), (_, until) in pairwise([*starts, (100, None)]):
        last = len(buckets) if until is None else first_after(buckets, until)
        # The first bucket of a step began under the weight before.
        for bucket in buckets[first_after(buckets, at) + 1 : last]:
            # Callers that keep their keys are not drawn request by request.
            of_half = bucket.baseline.callers_of_half
            requests = bucket.baseline.requests + bucket.candidate.requests
            if of_half is not None and of_half < ONE_BY_ONE_SHARE * requests:
                continue
            counts = _counted(bucket.candidate), _counted(bucket.baseline)
            if counts[0] is None or counts[1] is None:
                return None
            if weight < 100 and (at is None or bucket.end >= at + settled_after):
                found.append(Drawn(counts[0], counts[1], weight))
    return found


def _counted(traffic: ArmTraffic) -> int | None:
    # Requests that ended another way are not missing; where they are not counted, nothing can be said.
    if traffic.cancelled is None or traffic.refused is None:
        return None if traffic.requests else 0
    return traffic.requests + traffic.cancelled + traffic.refused


def log_e_missing(buckets: Sequence[Drawn]) -> float:
    """Logarithm of the evidence that more than the tolerance is missing, valid at every look.

    Each bucket's draw is binomial; a mixture over losses from 5 to 80 % is weighed against a loss of 2 %.
    """
    logs = [0.0] * len(_LOSSES)
    for drawn in buckets:
        share = drawn.weight / 100.0
        allowed = _share_left(share, TOLERANCE_SHARE)
        for i, loss in enumerate(_LOSSES):
            # Given how many arrived in all, the candidate's number is binomial whatever the traffic did.
            left = _share_left(share, loss)
            logs[i] += drawn.candidate * math.log(left / allowed)
            logs[i] += drawn.baseline * math.log((1.0 - left) / (1.0 - allowed))
    return log_sum_exp(logs) - math.log(len(_LOSSES))


def _share_left(share: float, loss: float) -> float:
    # What the candidate lost is missing from the whole as well.
    left = share * (1.0 - loss)
    return left / (left + 1.0 - share)
