"""Decides how many replicas a deployment should have from bounds, demand and the last decision. Pure.

Scales up when a request has waited in the queue, one step at a time, each with time to take effect. Scales down when
for a while one replica fewer would have been enough. Scales to none, and up from it, only where `min_replicas` is 0.
`deployments/replica_health.py` asks for a decision once a second and carries it out.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from tuneship.contract.common import count
from tuneship.service.telemetry.in_flight import Demand

# A replica that was just added gets this time to shorten the queue before another one is added.
COOLDOWN = timedelta(seconds=3)
# One replica fewer is enough when this share of the others' batches would be filled.
TARGET_UTILIZATION = 0.5


@dataclass(frozen=True)
class ReplicaBounds:
    """The limits on the number of a deployment's replicas."""

    least: int
    # The smaller of the deployment's limit and the machine's; never below `least`.
    most: int


@dataclass(frozen=True)
class Supply:
    """The replicas that serve a deployment."""

    # The number that answers.
    replicas: int
    # Requests that wait in the replicas for a slot.
    queued: int
    # Slots of one replica: the requests that it runs together.
    rows: int


@dataclass(frozen=True)
class ScalingSettings:
    """The operator's settings."""

    # How long a request may wait before a replica is added.
    queue: timedelta
    # How long a replica may be too many before it is ended.
    idle: timedelta


@dataclass(frozen=True)
class ScalingDecision:
    """A decision, which the next one starts from."""

    replicas: int
    # When it was decided.
    since: datetime
    # Since when one replica fewer would have been enough.
    calm_since: datetime
    # The reason for the last change, for the deployment's log.
    why: str = ""


def next_decision(
    before: ScalingDecision,
    bounds: ReplicaBounds,
    supply: Supply,
    demand: Demand,
    settings: ScalingSettings,
    now: datetime,
) -> ScalingDecision:
    """The decision from now on."""
    # The calm, in which one replica fewer would be enough, starts again with any sign of need.
    capacity = TARGET_UTILIZATION * supply.rows * (before.replicas - 1)
    if supply.queued > 0 or demand.in_flight > capacity:
        before = replace(before, calm_since=now)
    within = min(max(before.replicas, bounds.least), bounds.most)
    if within != before.replicas:
        return _changed(before, within, now, f"{bounds.least} to {bounds.most} are allowed")
    if before.replicas == 0:
        return _changed(before, 1, now, "a request woke it") if demand.in_flight else before

    is_queue_too_long = (
        demand.waited >= settings.queue
        and supply.queued > 0
        # Replicas that are being started or have just come may be enough.
        and supply.replicas >= before.replicas
        and now - before.since >= COOLDOWN
    )
    if before.replicas < bounds.most and is_queue_too_long:
        more = min(bounds.most, before.replicas + max(1, before.replicas // 2))
        waited_s = demand.waited.total_seconds()
        why = f"{count(demand.waiting, 'request waits', 'requests wait')}, the longest {waited_s:.1f} s"
        return _changed(before, more, now, why)

    calm = now - before.calm_since
    if before.replicas > bounds.least and calm >= settings.idle:
        why = f"one fewer would have done for {calm.total_seconds():.0f} s"
        return _changed(before, before.replicas - 1, now, why)
    return before


def _changed(before: ScalingDecision, replicas: int, now: datetime, why: str) -> ScalingDecision:
    return replace(before, replicas=replicas, since=now, calm_since=now, why=why)
