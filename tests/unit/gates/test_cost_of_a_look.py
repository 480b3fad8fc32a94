"""A rollout that waits days for a person takes thousands of looks, so each must stay cheap."""

import cProfile
import pstats
from dataclasses import replace
from typing import Any

import numpy as np

from tests.unit.gates.drawn.rules import begin, series_of
from tests.unit.gates.drawn.worlds import Minute, Service
from tests.unit.gates.rollouts import RUNNING, plan_with
from tuneship.gates.canary import judge
from tuneship.gates.metrics.series import Bucket
from tuneship.gates.record import ApprovalAsked, Look, Phase, RolloutRecord, SplitConfirmed, Verdict
from tuneship.gates.view import States

LOOKS, PER_MINUTE = 3600, 10_000.0


def long_wait() -> tuple[RolloutRecord, list[Bucket]]:
    """A rollout of 10,000 requests a minute that asked a person at look 20 and has waited ever since."""
    service = Service(np.random.default_rng(1), lambda *_: Minute(PER_MINUTE))
    plan = plan_with(approval="required")
    buckets = [service.bucket(number, 0) for number in range(-10, 0)]
    record = begin(plan, buckets, 1)
    look: Look | None = None
    for number in range(25):
        buckets.append(service.bucket(number, record.weight))
        look = judge(series_of(buckets), States(RUNNING, RUNNING), plan, record)
        record = record.plus(look)
        if look.verdict is Verdict.ADVANCE:
            record = record.plus(SplitConfirmed(look.next_weight or 0, look.at))
        if look.verdict is Verdict.ASK:
            record = record.plus(ApprovalAsked(look.at))
    assert look is not None
    assert record.phase is Phase.WAIT
    # To draw and judge all of them would take minutes; the buckets of an hour come again and again.
    drawn = [service.bucket(number, record.weight) for number in range(25, 85)]
    more: list[Look] = []
    for number in range(25, LOOKS):
        end = buckets[-1].end + (buckets[1].end - buckets[0].end)
        buckets.append(replace(drawn[number % len(drawn)], end=end))
        more.append(replace(look, number=number + 1, at=end, horizon=end, newest_baseline=end))
    return record.plus(*more), buckets


def test_a_look_after_sixty_hours_reads_only_what_is_new() -> None:
    record, buckets = long_wait()
    plan = plan_with(approval="required")
    judge(series_of(buckets[:-1]), States(RUNNING, RUNNING), plan, RolloutRecord(record.facts[:-1]))
    with cProfile.Profile() as profile:
        judge(series_of(buckets), States(RUNNING, RUNNING), plan, record)
    # 20 ms of processor time are some 100,000 calls; those that measure coverage are not counted.
    counts: Any = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    calls = sum(count[1] for place, count in counts.items() if "slipcover" not in place[2])
    assert 10_000 < calls < 100_000
