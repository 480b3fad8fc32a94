"""The split of one rollout: shifts it, renews its lease, returns the traffic, and never assumes success without an
answer.

The intention is recorded before a PATCH, the split after it was read back; only a rollback goes on without a record.
`If-Match` lets one writer win; a process that finds a split of somebody else stops without touching it. Knows no gate.
Next: `shift_traffic.py`, `rollback.py`.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from logging import Logger, LoggerAdapter
from typing import Any

from flows.rollout.record_file import RecordFile
from flows.shared.approval import reasons_of
from tasks.endpoints import (
    KeyDraw,
    get_canary_endpoint,
    members,
    renew_canary_lease,
    update_canary_endpoint,
)
from tuneship.client import ApiError, ServiceUnreachable, TuneshipError
from tuneship.contract.endpoints import CanaryEndpoint, LeaseRequest
from tuneship.contract.errors import DeploymentError, InvalidRequestError, ResourceNotFound
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import (
    ApprovalAnswered,
    Look,
    RolloutRecord,
    SplitConfirmed,
    SplitIntended,
)

Log = Logger | LoggerAdapter[Any]
Update = Callable[
    [str, Mapping[str, int], int, int | None, LeaseRequest | None, KeyDraw | None], CanaryEndpoint
]

# At the default time between two looks, a shift is tried for a minute, because a rollback can still follow it; a
# return, which nothing follows but the end of the lease, for eight minutes. No pause is longer than that time, so with
# fewer than 30 s between looks both give up sooner.
SHIFT_TRIES, RETURN_TRIES = 6, 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
# One or two failures are usual while the service restarts.
ALERT_AT_TRY = 3


class SplitLost(Exception):
    """The split no longer belongs to this rollout: `lease_expired`, `human_rejected` or `foreign_change`."""

    def __init__(self, reason: str) -> None:
        """Keep the reason for the result."""
        super().__init__(reason)
        self.reason = reason


class NotConfirmed(Exception):
    """A change of the split could not be confirmed within its tries."""


class PausedByPerson(NotConfirmed):
    """A change was not sent, or was refused, because a person has paused the rollout at the service."""


@dataclass(frozen=True)
class Calls:
    """The three operations on an endpoint's split."""

    get: Callable[[str], CanaryEndpoint]
    update: Update
    renew: Callable[[str, int], CanaryEndpoint]
    # Renews the lease at every look, as a part of the look's own node on the run page.
    keep: Callable[[str, int], CanaryEndpoint] = renew_canary_lease.fn


AS_TASKS = Calls(get_canary_endpoint, update_canary_endpoint, renew_canary_lease)
# The same without Prefect: a rollback must work while the run, or its server, is going down.
PLAIN = Calls(get_canary_endpoint.fn, update_canary_endpoint.fn, renew_canary_lease.fn)


def candidate_weight(endpoint: CanaryEndpoint, plan: CanaryPlan) -> int | None:
    """The candidate's percentage where the pair has all traffic; None for any other split."""
    shares = {one.id: one.traffic_percentage for one in endpoint.deployments}
    weight = shares.pop(plan.candidate_deployment_id, 0)
    baseline = shares.pop(plan.baseline_deployment_id, 0)
    return weight if weight + baseline == 100 and not any(shares.values()) else None


def service_time(record: RolloutRecord) -> datetime | None:
    """The newest time of the service that the record knows."""
    times = [fact.at for fact in record.facts if isinstance(fact, Look | SplitConfirmed)]
    return next((at for at in reversed(times) if at is not None), None)


def last_intended(record: RolloutRecord) -> int | None:
    """The candidate's weight that was intended or confirmed last; None before the first shift."""
    splits = [fact for fact in record.facts if isinstance(fact, SplitIntended | SplitConfirmed)]
    return splits[-1].candidate_weight if splits else None


@dataclass
class RolloutSplit:
    """One rollout's claim to its endpoint. `version` is None on a server without versions, leases and reading back."""

    plan: CanaryPlan
    file: RecordFile
    version: int | None
    log: Log
    # A time of the service that the record may lack: before the first shift, then that of each change as read
    # back. A shift may come long after its look; what was served meanwhile belongs to the weight before.
    known_time: datetime | None = None
    # Whether the server draws routing keys by a rollout's id; a split is read before it is changed.
    draws_keys: bool = False
    # Whether the server lets a person pause a rollout, and whether one has, as it was read last.
    knows_pauses: bool = False
    is_paused: bool = False
    calls: Calls = AS_TASKS
    # Notes for the reader of the result.
    notes: list[str] = field(default_factory=list[str])

    @property
    def endpoint_id(self) -> str:
        """Id of the endpoint."""
        return self.file.record.begun.endpoint_id

    @property
    def is_extended(self) -> bool:
        """Whether the server can be read back and has versions and leases."""
        return self.version is not None

    def shares(self, weight: int) -> dict[str, int]:
        """The whole split, in percent by deployment, at this weight of the candidate."""
        return {
            self.plan.baseline_deployment_id: 100 - weight,
            self.plan.candidate_deployment_id: weight,
        }

    def shift(self, weight: int, why: str) -> None:
        """Give the candidate this weight, under a lease. Raises `SplitLost` or `NotConfirmed`."""
        self.file.append(SplitIntended(weight, why))
        lease = LeaseRequest(seconds=self.plan.lease_seconds, fallback=members(self.shares(0)))
        self._change(weight, lease if self.is_extended else None, SHIFT_TRIES)
        self.confirm(weight)

    def give_back(self, why: str, tries: int = RETURN_TRIES) -> None:
        """Give the baseline all traffic, without a lease; a split that is so already is only confirmed.

        The request is sent even if the record cannot be written. Raises `SplitLost` where somebody else
        set the split, `NotConfirmed` when the tries are used up.
        """
        self.file.append_if_possible(SplitIntended(0, why))
        self._change(0, None, tries)
        self.confirm(0)
        for problem in self.file.unwritten:
            self.log.critical("the traffic is returned all the same: %s", problem)

    def keep(self) -> None:
        """Renew the lease and check that nobody changed the split. A failed call is left to the next look."""
        if not self.is_extended:
            return
        try:
            seen = self.calls.keep(self.endpoint_id, self.plan.lease_seconds)
        except ApiError as error:
            if error.retryable:
                self.log.warning("the lease was not renewed (%s)", describe(error))
            elif self.verify().lease is None:
                self.shift(self.file.record.weight, "the lease had ended")
        except TuneshipError as error:
            self.log.warning("the lease was not renewed (%s)", describe(error))
        else:
            self._check_ours(seen)

    def keep_for(self, seconds: int) -> None:
        """Renew the lease for a long wait."""
        if self.is_extended:
            self._check_ours(self.calls.renew(self.endpoint_id, seconds))

    def end_lease(self) -> None:
        """End the lease, so that the split stays; confirmed by reading it back. Raises `NotConfirmed`, `SplitLost`."""
        if not self.is_extended:
            return
        for pause_s in self._pauses(SHIFT_TRIES):
            try:
                if self.verify().lease is None:
                    return
                self.refuse_if_paused()
                self.version = self.calls.renew(self.endpoint_id, 0).version
            except TuneshipError as error:
                self.log.warning("the lease was not ended (%s)", describe(error))
                time.sleep(pause_s)
        raise NotConfirmed("the end of the lease is not confirmed")

    def leave_alone(self) -> None:
        """Remove the baseline from a split that gives the candidate all traffic."""
        alone = {self.plan.candidate_deployment_id: 100}
        self.version = self.calls.update(
            self.endpoint_id, alone, 100, self.version, None, None
        ).version

    def verify(self) -> CanaryEndpoint:
        """Read the split back; a bare server gets it again instead, because its answer holds the split. Raises
        `SplitLost`.
        """
        weight = self.file.record.weight
        seen = self.calls.get(self.endpoint_id) if self.is_extended else self._send(weight, None)
        self._check_ours(seen)
        return seen

    def confirm(self, weight: int) -> None:
        """Record that the split was read back, a fact that is true even if the disk refuses it."""
        times = (service_time(self.file.record), self.known_time)
        at = max((one for one in times if one is not None), default=None)
        self.file.append_if_possible(SplitConfirmed(weight, at, self.version))
        self.log.info("split: candidate %d %%, baseline %d %%", weight, 100 - weight)

    def refuse_if_paused(self) -> None:
        """Raise `PausedByPerson` where the split that was read last is held by a person."""
        if self.is_paused:
            raise PausedByPerson("a person has paused the rollout")

    def learn(self, seen: CanaryEndpoint) -> None:
        """Note what the server offers, and whether a person has paused the rollout."""
        self.draws_keys = seen.large_keys is not None
        self.knows_pauses = "paused" in seen.model_fields_set
        self.is_paused = seen.paused is not None

    def was_reverted(self, seen: CanaryEndpoint) -> bool:
        """Whether a person has reverted this very rollout: the split of another one has another id."""
        return seen.reverted is not None and seen.rollout_id == self.file.record.begun.rollout_id

    def _check_ours(self, seen: CanaryEndpoint) -> None:
        found = candidate_weight(seen, self.plan)
        if found != self.file.record.weight or seen.version != self.version:
            raise self.lost_to(seen)
        self.learn(seen)

    def lost_to(self, seen: CanaryEndpoint) -> SplitLost:
        """The error that says what took the split from this rollout."""
        if candidate_weight(seen, self.plan) == 0 and seen.lease is None:
            self.version = seen.version
            if not self.was_reverted(seen):
                return SplitLost("lease_expired")
            self._record_revert(seen)
            return SplitLost("human_rejected")
        return SplitLost("foreign_change")

    def _record_revert(self, seen: CanaryEndpoint) -> None:
        """Record who has reverted the rollout, once: a run that is killed after it comes here again."""
        decided = seen.reverted
        if decided is not None:
            said = ApprovalAnswered("roll back", decided.by, reasons_of(decided), decided.person)
            if self.file.record.answer != said:
                self.file.append_if_possible(said)

    def _change(self, weight: int, lease: LeaseRequest | None, tries: int) -> None:
        """Send the split until it is read back, even where answers are lost."""
        # A rollback may follow a shift that was interrupted before its answer came.
        may_be_applied = weight == 0
        for attempt, pause_s in enumerate(self._pauses(tries), start=1):
            retry_after_s = 0.0
            try:
                if self._is_set(weight, lease, may_be_applied):
                    return
                if weight:
                    self.refuse_if_paused()
                answer = self._send(weight, lease)
                may_be_applied = True
                # A bare server cannot be read back: its answer to the PATCH is all there is.
                if self.is_extended:
                    if self._is_set(weight, lease, may_be_applied):
                        return
                elif candidate_weight(answer, self.plan) == weight:
                    return
            except TuneshipError as error:
                # Certainly nothing is changed where the service refused, or could not be reached at all.
                is_refused = isinstance(error, ServiceUnreachable) and not error.retryable
                if isinstance(error, ApiError):
                    is_refused = error.status < 500 and error.status != 408
                    retry_after_s = min(LONGEST_PAUSE_S, error.retry_after or 0.0)
                may_be_applied = may_be_applied or not is_refused
                self._judge(error, attempt, weight, may_be_applied)
            time.sleep(max(pause_s, retry_after_s))
        raise NotConfirmed(f"the split was not confirmed at {weight} % after {tries} tries")

    def _is_set(self, weight: int, lease: LeaseRequest | None, may_be_applied: bool) -> bool:
        """Whether the split is as wanted. Raises `SplitLost` for a split that is neither the old nor the new one."""
        if not self.is_extended:
            return False
        seen = self.calls.get(self.endpoint_id)
        self.learn(seen)
        found = candidate_weight(seen, self.plan)
        if not may_be_applied:
            self._check_ours(seen)
            return False
        possible = {self.file.record.weight, weight}
        if weight == 0:  # any shift of this rollout may have arrived late
            facts = self.file.record.facts
            possible |= {fact.candidate_weight for fact in facts if isinstance(fact, SplitIntended)}
        if found not in possible:
            raise self.lost_to(seen)
        self.version, self.known_time = seen.version, seen.updated_at
        return found == weight and (seen.lease is None) == (lease is None)

    def _send(self, weight: int, lease: LeaseRequest | None) -> CanaryEndpoint:
        shares, keys = self.shares(weight), None
        if self.draws_keys:
            keys = KeyDraw(self.file.record.begun.rollout_id, self.plan.large_keys)
        if lease is not None and self.knows_pauses:
            lease = lease.model_copy(update={"pausable": True})
        try:
            return self.calls.update(self.endpoint_id, shares, weight, self.version, lease, keys)
        except (ResourceNotFound, DeploymentError):
            if weight != 0:
                raise
            # A candidate that is deleted (404) or being deleted (409) cannot be named, and gets no traffic anyway.
            alone = {self.plan.baseline_deployment_id: 100}
            return self.calls.update(self.endpoint_id, alone, 0, self.version, None, None)

    def _judge(self, error: TuneshipError, attempt: int, weight: int, may_be_applied: bool) -> None:
        """Log the failure for a retry, or raise: a refused key stays refused.

        A step up that a retry cannot bring either is given up at once; a rollback is retried all the same.
        """
        if isinstance(error, ApiError) and error.status in (401, 403):
            raise NotConfirmed(f"the service refused the key ({error.status})") from error
        # The next try reads the split first, which shows who changed it (412) or paused the rollout (409).
        is_explained = isinstance(error, InvalidRequestError) and error.status in (409, 412)
        if weight and not may_be_applied and not error.retryable and not is_explained:
            raise NotConfirmed(f"the split was refused ({describe(error)})") from error
        level = self.log.error if attempt >= ALERT_AT_TRY else self.log.warning
        level("split to %d %%: try %d failed (%s)", weight, attempt, describe(error))

    def _pauses(self, tries: int) -> Iterator[float]:
        """Yield the pauses: doubling from one second to 30, and never longer than the time between two looks."""
        for attempt in range(tries):
            pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt)
            yield min(pause_s, self.plan.look_every_seconds)


def split_of_record(
    plan: CanaryPlan, file: RecordFile, log: Log, calls: Calls = AS_TASKS
) -> RolloutSplit:
    """The split of a rollout that another process drove, at the endpoint's version of now."""
    begun = file.record.begun
    version = None if begun.server else calls.get(begun.endpoint_id).version
    return RolloutSplit(plan, file, version, log, calls=calls)


def describe(error: Exception) -> str:
    """Describe an error for a log line: its status and code, never a body."""
    if isinstance(error, ApiError):
        return f"{error.status} {error.sent_code}"
    return type(error).__name__
