"""Opens a rollout: a new one from an endpoint at rest, or the open one of the same plan where it stopped.

All refusals are here, before any traffic moves. Next: `shift_traffic.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from flows.rollout.endings import lost
from flows.rollout.expectations import HOURS, Before, expect
from flows.rollout.looks import raise_if_unauthorized, read_state
from flows.rollout.page import show
from flows.rollout.record_file import Damaged, RecordFile, RecordFolder
from flows.rollout.result import RolloutResult, rejected
from flows.rollout.split import (
    Log,
    RolloutSplit,
    SplitLost,
    candidate_weight,
    describe,
    last_intended,
)
from tasks.endpoints import (
    NO_SUCH_ROUTE,
    create_canary_endpoint,
    get_canary_endpoint,
    list_canary_endpoints,
)
from tasks.metrics import get_deployment_metrics
from tuneship.client import ApiError, TuneshipError
from tuneship.contract.endpoints import CanaryEndpoint
from tuneship.contract.errors import ResourceNotFound
from tuneship.gates.latency import usual_hour
from tuneship.gates.metrics.metrics_reader import read_series
from tuneship.gates.metrics.series import Unusable
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.readings import choose_gates
from tuneship.gates.record import Begun, Ended, Resumed
from tuneship.gates.reports.words import forecast_in_words
from tuneship.gates.rules import GONE
from tuneship.prefect.waits import DeploymentNotRunning, wait_for_deployment

A_DAY = timedelta(hours=HOURS)
# What a server of the bare description does not offer.
LACKING = ("reading back", "versions", "leases")


def open_rollout(plan: CanaryPlan, folder: RecordFolder, log: Log) -> RolloutSplit | RolloutResult:
    """Resume or begin the rollout; a result says why it is refused."""
    for file in reversed(folder.of(plan)):
        if not file.is_open:
            continue
        recorded = CanaryPlan.model_validate(file.record.begun.plan)
        if recorded.is_resumed_by(plan, file.record.begun.plan_digest):
            return resume(recorded, file, log)  # with what its defaults were when it began
        if file.record.weight == 0:
            continue
        begun = file.record.begun
        if not begun.server:
            # The lease may have returned its traffic since; then nothing is in the way.
            left = _as_left(plan, file, log)
            try:
                settle(left)
            except SplitLost as error:
                file.append(lost(left, error.reason))
        if file.is_open:
            note = f"{file.path.stem} is unfinished: run its own plan again"
            return rejected("rollout_in_progress", note, begun.endpoint_id)
    return _begin(plan, folder, log)


def resume(plan: CanaryPlan, file: RecordFile, log: Log) -> RolloutSplit:
    """Resume the open rollout from its record; `settle` makes record and split agree."""
    log.info("rollout %s continues at %d %%", file.path.stem, file.record.weight)
    if any(isinstance(fact, Ended) for fact in file.record.facts):
        file.append(Resumed())
    return _as_left(plan, file, log)


def _as_left(plan: CanaryPlan, file: RecordFile, log: Log) -> RolloutSplit:
    begun = file.record.begun
    if begun.server:
        return RolloutSplit(plan, file, None, log, known_time=_now(_before(plan, None, log)))
    endpoint = get_canary_endpoint(begun.endpoint_id)
    # Killed in its first shift, the record knows no time of the service; without one no evidence would ever count.
    return RolloutSplit(plan, file, endpoint.version, log, known_time=endpoint.updated_at)


def settle(split: RolloutSplit) -> None:
    """Make record and split agree after a crash between an intention and its confirmation.

    Raises `SplitLost` where the split is neither the confirmed nor the intended one.
    """
    record = split.file.record
    intended = last_intended(record)
    if intended is None:
        return
    if not split.is_extended:
        if intended > record.weight:  # it cannot be read back, so the smaller of the two is set
            split.shift(record.weight, "resumed")
        return
    endpoint = split.calls.get(split.endpoint_id)
    split.learn(endpoint)
    found = candidate_weight(endpoint, split.plan)
    is_back = found == 0 and endpoint.lease is None and intended > 0
    # A first shift that nobody had confirmed may have been reverted, too; it must not be sent again.
    if is_back and (record.weight > 0 or split.was_reverted(endpoint)):
        raise split.lost_to(endpoint)
    if found == record.weight:
        return
    if found != intended:
        raise SplitLost("foreign_change")
    split.confirm(intended)


def _begin(plan: CanaryPlan, folder: RecordFolder, log: Log) -> RolloutSplit | RolloutResult:
    damaged, file = folder.damaged(), folder.new(plan)
    endpoint = _admitted(plan, damaged, file.path.stem, log)
    if isinstance(endpoint, RolloutResult):
        return endpoint
    endpoint_id = endpoint.id if endpoint else str(plan.endpoint_id)
    version = endpoint.version if endpoint else None
    # A bare server does not know the parameter.
    before = _before(plan, endpoint_id if version is not None else None, log)
    gates = choose_gates(plan, before.answer.metrics if before.answer else None)
    expected = expect(plan, before, gates, endpoint_id)
    if isinstance(expected, RolloutResult):
        return expected
    begun = Begun(
        rollout_id=file.path.stem,
        endpoint_id=endpoint_id,
        endpoint_name=endpoint.name if endpoint else None,
        plan=expected.plan.model_dump(mode="json"),
        plan_digest=plan.digest(),
        gates=gates,
        usual=before.usual,
        today=expected.today,
        forecast=expected.forecast,
        warnings=expected.warnings,
        server=() if version is not None else LACKING,
    )
    file.append(begun)
    log.info("rollout %s begins on %s", begun.rollout_id, begun.endpoint_id)
    for sentence in forecast_in_words(begun):
        log.info("forecast: %s", sentence)
    for warning in begun.warnings:
        log.warning("%s", warning)
    show(file.record, log)
    return RolloutSplit(expected.plan, file, version, log, known_time=_now(before))


def _admitted(
    plan: CanaryPlan, damaged: Sequence[Damaged], rollout_id: str, log: Log
) -> CanaryEndpoint | RolloutResult | None:
    """Find or create the endpoint, or refuse the plan; None where a bare server cannot read endpoints."""
    for record in damaged:
        log.warning("%s; it is left out", record.why)
    # These need no endpoint, so a plan that they refuse creates none.
    result = _rejected_if_damaged(damaged, plan) or _result_if_gone(plan)
    if result is not None:
        return result
    endpoint = _find_or_create(plan, rollout_id)
    # Only now is the id known by which an earlier rollout may have named it.
    endpoint_id = endpoint.id if endpoint else plan.endpoint_id
    result = _rejected_if_damaged(damaged, plan, endpoint_id)
    if result is not None:
        return result
    if endpoint is None:
        return None
    if endpoint.lease is not None:
        return rejected("rollout_in_progress", "somebody else holds a lease", endpoint.id)
    if candidate_weight(endpoint, plan) != 0:
        return rejected("foreign_change", "the baseline does not have all traffic", endpoint.id)
    return endpoint


def explained(result: RolloutResult, log: Log) -> RolloutResult:
    """Log why a rollout is refused before its first split, which nothing else does; returns the result."""
    log.warning("%s", "; ".join([result.headline, *result.notes]))
    return result


def foresee(plan: CanaryPlan, log: Log) -> RolloutResult | None:
    """Forecast a rollout before its candidate exists; a result says why it would be refused."""
    endpoint_id = plan.endpoint_id
    # A bare server says nothing of an endpoint's own traffic.
    endpoint = _existing(endpoint_id) if endpoint_id else None
    if endpoint_id is None or endpoint is None or endpoint.version is None:
        return None
    before = _before(plan, endpoint_id, log)
    gates = choose_gates(plan, before.answer.metrics if before.answer else None)
    expected = expect(plan, before, gates, endpoint_id)
    if isinstance(expected, RolloutResult):
        return explained(expected, log)
    begun = Begun("", endpoint_id, expected.plan.model_dump(mode="json"), "", gates)
    begun = replace(begun, today=expected.today, forecast=expected.forecast)
    for sentence in (*forecast_in_words(begun), *expected.warnings):
        log.info("the rollout to come: %s", sentence)
    return None


def _now(before: Before) -> datetime | None:
    return before.series.at if before.series else None


def _rejected_if_damaged(
    damaged: Sequence[Damaged], plan: CanaryPlan, endpoint_id: str | None = None
) -> RolloutResult | None:
    """Refuse an endpoint with a damaged record, because its rollout may have moved traffic."""
    for record in damaged:
        if record.blocks(plan, endpoint_id):
            note = f"{record.why}: check the endpoint's split, then move the record away"
            begun = record.begun
            return rejected("record_damaged", note, begun.endpoint_id if begun else None)
    return None


def _result_if_gone(plan: CanaryPlan) -> RolloutResult | None:
    baseline, candidate = (
        read_state(plan.baseline_deployment_id),
        read_state(plan.candidate_deployment_id),
    )
    if baseline.status in GONE:
        note = f"baseline {plan.baseline_deployment_id} is {baseline.status}"
        return RolloutResult(
            outcome="aborted",
            reason="baseline_missing",
            endpoint_id=plan.endpoint_id,
            notes=[note],
        )
    try:
        if candidate.status not in ("running", None):
            wait_for_deployment(plan.candidate_deployment_id)
    except (DeploymentNotRunning, ResourceNotFound) as error:
        return rejected("candidate_failed", str(error), plan.endpoint_id)
    return None


def _existing(endpoint_id: str) -> CanaryEndpoint | None:
    """Read an endpoint; None where a bare server cannot read endpoints."""
    try:
        return get_canary_endpoint(endpoint_id)
    except ApiError as error:
        if error.status not in NO_SUCH_ROUTE:
            raise
        missing = error
    # A 404 says no endpoint or no such operation; a server that can list endpoints has none of this id.
    try:
        list_canary_endpoints(endpoint_id)
    except ApiError as error:
        if error.status in NO_SUCH_ROUTE:
            return None
        raise
    raise missing


def _find_or_create(plan: CanaryPlan, rollout_id: str) -> CanaryEndpoint | None:
    """Find or create the endpoint; None where a bare server cannot read endpoints."""
    if plan.endpoint_id is not None:
        return _existing(plan.endpoint_id)

    name = str(plan.endpoint_name)
    try:
        page = list_canary_endpoints(name)
        if page.canary_endpoints:
            return page.canary_endpoints[0]
    except ApiError as error:
        if error.status not in NO_SUCH_ROUTE:
            raise
    split = {plan.baseline_deployment_id: 100, plan.candidate_deployment_id: 0}
    return create_canary_endpoint(name, split, rollout_id)


def _before(plan: CanaryPlan, endpoint_id: str | None, log: Log) -> Before:
    baseline = plan.baseline_deployment_id
    try:
        answer = get_deployment_metrics(baseline, interval=plan.interval, endpoint_id=endpoint_id)
    except TuneshipError as error:
        raise_if_unauthorized(error)
        log.warning("no metrics of the baseline before the start (%s)", describe(error))
        return Before()
    try:
        series = read_series(answer, answer, plan.interval)
    except Unusable:
        return Before(answer)
    before = Before(answer, series, usual_hour(series, plan))
    # The driver sends as much at night.
    if plan.traffic is not None or endpoint_id is None:
        return before
    try:
        day = get_deployment_metrics(
            baseline, interval="1h", start_time=series.at - A_DAY, endpoint_id=endpoint_id
        )
        return replace(before, day=read_series(day, day, "1h"))
    except (TuneshipError, Unusable) as error:
        if isinstance(error, TuneshipError):
            raise_if_unauthorized(error)
        log.info("the traffic of the last day is not known (%s)", describe(error))
        return before
