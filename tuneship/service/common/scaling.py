"""How many replicas a deployment shall have: bounds, what its callers want, and what was decided before. Pure.

Up when a request has waited in the queue, a step at a time, each given time to show its effect. Down when for a while
one replica fewer would have done. To none, and up from it, only where `min_replicas` is 0.
`deployments/replica_health.py` asks once a second and carries the answer out.
"""

from dataclasses import dataclass, replace
from datetime import datetime, timedelta

# A replica that was just added has to empty the queue before another one is added.
SETTLED = timedelta(seconds=3)
# One replica fewer would do when so much of the batches of the others would be filled.
CALM_SHARE = 0.5


@dataclass(frozen=True)
class Bounds:
    """What limits the number of a deployment's replicas."""

    least: int
    most: int
    """What the deployment may have and the machine holds; never below `least`."""


@dataclass(frozen=True)
class Demand:
    """A deployment's requests."""

    under_way: int = 0
    """The most at once since the last look, so that short requests between two looks count."""
    waiting: int = 0
    """Those without a first token."""
    waited: timedelta = timedelta()
    """The longest of them."""


@dataclass(frozen=True)
class Supply:
    """What serves the deployment."""

    replicas: int
    """Those that answer."""
    queued: int
    """Requests that they say wait for a place in a batch."""
    rows: int
    """Requests that one replica runs at once."""


@dataclass(frozen=True)
class ScalingSettings:
    """The operator's settings."""

    queue: timedelta
    """A request may wait so long before a replica is added."""
    idle: timedelta
    """A replica may be too many for so long before it is ended."""


@dataclass(frozen=True)
class ScalingDecision:
    """What was decided; kept from one look to the next."""

    replicas: int
    since: datetime
    """When it was decided."""
    calm_since: datetime
    """From when on one fewer would have done."""
    why: str = ""
    """Of the last change, for the deployment's log."""


def next_decision(
    before: ScalingDecision,
    bounds: Bounds,
    supply: Supply,
    demand: Demand,
    patience: ScalingSettings,
    now: datetime,
) -> ScalingDecision:
    """The number of replicas from now on."""
    is_needed = _is_needed(before.replicas, supply, demand)
    pace = replace(before, calm_since=now) if is_needed else before
    within = min(max(pace.replicas, bounds.least), bounds.most)
    if within != pace.replicas:
        return _changed(pace, within, now, f"{bounds.least} to {bounds.most} are allowed")
    if pace.replicas == 0:
        return _changed(pace, 1, now, "a request woke it") if demand.under_way else pace
    if pace.replicas < bounds.most and _is_queue_too_long(pace, supply, demand, patience, now):
        more = min(bounds.most, pace.replicas + max(1, pace.replicas // 2))
        waited = demand.waited.total_seconds()
        return _changed(
            pace, more, now, f"{demand.waiting} requests wait, the longest {waited:.1f} s"
        )
    calm = now - pace.calm_since
    if pace.replicas > bounds.least and calm >= patience.idle:
        why = f"one fewer would have done for {calm.total_seconds():.0f} s"
        return _changed(pace, pace.replicas - 1, now, why)
    return pace


def _is_needed(replicas: int, supply: Supply, demand: Demand) -> bool:
    """Whether one fewer would not do."""
    room = CALM_SHARE * supply.rows * (replicas - 1)
    return supply.queued > 0 or demand.under_way > room


def _is_queue_too_long(
    pace: ScalingDecision, supply: Supply, demand: Demand, patience: ScalingSettings, now: datetime
) -> bool:
    """Nothing more is added while replicas are being started or have just come."""
    return (
        demand.waited >= patience.queue
        and supply.queued > 0
        and supply.replicas >= pace.replicas
        and now - pace.since >= SETTLED
    )


def _changed(pace: ScalingDecision, replicas: int, now: datetime, why: str) -> ScalingDecision:
    return replace(pace, replicas=replicas, since=now, calm_since=now, why=why)
