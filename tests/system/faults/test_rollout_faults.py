"""Faults 21, 22 and 24-27 hit rollouts against the real service; these tests check where the traffic ends up."""

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.rollout.result import RollbackIncomplete
from flows.shift_traffic import shift_traffic
from tests.flows.conftest import plan
from tests.support.fakes.canary_service import CANDIDATE, FakeService
from tests.support.fakes.proxy import (
    Exchange,
    Fault,
    Proxy,
    cut_request,
    passed,
    refused,
    reset_unheard,
    rewritten,
)
from tests.support.repeats import variants
from tests.system.faults.stage import BUCKET, Stage
from tuneship.client import ApiError
from tuneship.contract.deployments import DeploymentStatus
from tuneship.prefect.connection import connect, disconnect
from tuneship.prefect.waits import JobOverdue, WaitPolicy, wait_for_job
from tuneship.settings import ClientSettings
from tuneship.store.database import tables

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

ALL, ANY = "GET|POST|PATCH|DELETE", "/.*"
# Number of a bucket in which the candidate has its first share.
MIDDLE = 3


@pytest.fixture
def stage(prefect_api: None, records: Path, tmp_path: Path) -> Iterator[Stage]:
    """Set up a service with both deployments and their endpoint."""
    with Stage(tmp_path) as created:
        created.set_up()
        yield created


@pytest.mark.essential
def test_without_a_fault_it_is_promoted_step_by_step(stage: Stage) -> None:
    result = shift_traffic(stage.plan())

    assert (result.outcome, result.reason) == ("promoted", "none")
    assert stage.seen == [0, 25, 50, 100]
    assert stage.weight == 100


KEY_REFUSED = {
    "401": refused(401, "authentication_error"),
    "403": refused(403, "permission_denied"),
}


@pytest.mark.parametrize("fault", KEY_REFUSED.values(), ids=KEY_REFUSED)
def test_21_a_key_that_is_refused_in_mid_run_leaves_the_traffic_to_the_lease(
    stage: Stage, fault: Fault
) -> None:
    def refuse_all() -> None:
        stage.proxy.heal()
        stage.proxy.play(ALL, ANY, [fault], for_ever=True)

    stage.at_tick[MIDDLE] = refuse_all

    with pytest.raises(ApiError):
        shift_traffic(stage.plan())

    assert stage.weight == 25, "the pipeline moves nothing"
    stage.service.clock.ahead += timedelta(seconds=stage.plan().lease_seconds)
    stage.service.until(lambda: stage.weight == 0)


def test_21_without_leases_the_traffic_stays_where_it_was(prefect_api: None, records: Path) -> None:
    with FakeService(extensions=False) as bare, Proxy(int(bare.url.rpartition(":")[2])) as proxy:
        connect(ClientSettings(url=f"http://127.0.0.1:{proxy.port}", api_key="k", client_id="t"))
        fault = refused(401, "authentication_error")
        bare.at_tick[MIDDLE] = lambda: proxy.play(ALL, ANY, [fault], for_ever=True)

        with pytest.raises((ApiError, RollbackIncomplete)):
            shift_traffic(plan(quality_gates=None, steps=[25, 50, 100], bake_weight=None))

        assert bare.weights[CANDIDATE] == 25
        disconnect()


def test_22_a_job_that_never_ends_is_cancelled_at_the_deadline(stage: Stage) -> None:
    job_id = stage.service.job()
    stage.service.trainer().start_of(10)
    stage.service.until(lambda: stage.service.job_status(job_id) == "running")

    with pytest.raises(JobOverdue):
        wait_for_job(job_id, WaitPolicy(deadline_seconds=0.0, cancels=True))

    stage.service.until(lambda: stage.service.job_status(job_id) == "cancelled")


def metrics_of(stage: Stage, fault: Fault, deployment: str = "[^/]+") -> None:
    """Apply the fault to every answer with metrics from now on."""
    stage.proxy.play("GET", f"/v1/deployments/{deployment}/metrics", [fault], for_ever=True)


def each_series(change: Callable[[list[Any]], list[Any]]) -> Fault:
    """Return a fault that changes every list of the answer except timestamps and histograms."""

    def spoil(answer: dict[str, Any]) -> None:
        for series in answer["metrics"].values():
            for name, values in series.items():
                if name not in ("timestamps", "histogram") and isinstance(values, list):
                    series[name] = change(values)

    return rewritten(spoil)


def emptied(answer: dict[str, Any]) -> None:
    for series in answer["metrics"].values():
        for name, values in series.items():
            if isinstance(values, list):
                series[name] = []


class Stale:
    """A fault that repeats the first answer to each request for ever."""

    def __init__(self) -> None:
        self._first: dict[str, bytes] = {}

    async def __call__(self, exchange: Exchange) -> None:
        deployment = exchange.head.split(b"/metrics", 1)[0].decode()
        answer = self._first.get(deployment) or await exchange.pass_on()
        await exchange.answer(self._first.setdefault(deployment, answer))


def nan_text(answer: dict[str, Any]) -> str:
    """Replace the values by NaN, which Python's JSON and some servers write although it is no valid JSON."""
    for series in answer["metrics"].values():
        for name, values in series.items():
            if name not in ("timestamps", "complete", "histogram") and isinstance(values, list):
                series[name] = [float("nan") for _ in values]
    return json.dumps(answer)


MISSING = {
    "gap": lambda: refused(503, "internal_error"),
    "reset": lambda: reset_unheard,
    "empty": lambda: rewritten(emptied),
    "nulls": lambda: each_series(lambda values: [None for _ in values]),
    "nan": lambda: rewritten(nan_text),
    "not-json": lambda: rewritten(lambda _: "<html>"),
    "stale": Stale,
}


@pytest.mark.parametrize("of_both", [True, False], ids=["both", "candidate"])
@pytest.mark.parametrize("fault", variants(MISSING.values(), 3), ids=MISSING)
def test_24_nothing_is_promoted_on_missing_data(
    stage: Stage, fault: Callable[[], Fault], of_both: bool
) -> None:
    metrics_of(stage, fault(), "[^/]+" if of_both else stage.candidate)

    result = shift_traffic(stage.plan(max_looks_per_step=8, wait_for_traffic="0s"))

    assert result.outcome == "rolled_back"
    assert result.reason in ("metrics_unavailable", "insufficient_data")
    assert max(stage.seen) == 25, "not one step further"
    assert stage.weight == 0
    assert {one["verdict"] for one in result.decisions} <= {"hold", "rollback"}


def test_24_too_few_requests_are_no_data_either(stage: Stage) -> None:
    stage.per_bucket = 8  # 2 of them for the candidate

    result = shift_traffic(stage.plan(max_looks_per_step=8, wait_for_traffic="0s"))

    assert (result.outcome, result.reason) == ("rolled_back", "insufficient_data")
    assert (max(stage.seen), stage.weight) == (25, 0)


def test_24_a_gap_in_the_middle_only_holds(stage: Stage) -> None:
    gap = [refused(503, "internal_error")] * 8  # two looks: both deployments, twice each
    stage.at_tick[MIDDLE] = lambda: stage.proxy.play("GET", "/v1/deployments/[^/]+/metrics", gap)

    result = shift_traffic(stage.plan())

    assert result.outcome == "promoted"
    assert stage.seen == [0, 25, 50, 100]
    assert [one["verdict"] for one in result.decisions if one.get("missing")] == ["hold"] * 2


SKEWS = [timedelta(days=-1), timedelta(minutes=-10), timedelta(minutes=10), timedelta(days=1)]


@pytest.mark.parametrize("ahead", variants(SKEWS, 1), ids=["-1d", "-10m", "+10m", "+1d"])
def test_25_another_clock_at_the_service_changes_nothing(
    prefect_api: None, records: Path, tmp_path: Path, ahead: timedelta
) -> None:
    with Stage(tmp_path, ahead) as stage:
        stage.set_up()
        result = shift_traffic(stage.plan())

        assert result.outcome == "promoted"
        assert stage.seen == [0, 25, 50, 100]


def jump(stage: Stage, by: timedelta) -> None:
    """Change the service's clock between two buckets."""
    stage.service.clock.ahead += by


def test_25_a_jump_within_the_lease_is_a_gap(stage: Stage) -> None:
    stage.at_tick[MIDDLE] = lambda: jump(stage, 5 * BUCKET)

    assert shift_traffic(stage.plan()).outcome == "promoted"
    assert stage.seen == [0, 25, 50, 100]


@pytest.mark.essential
def test_25_a_jump_beyond_the_lease_returns_the_traffic(stage: Stage) -> None:
    stage.at_tick[MIDDLE] = lambda: jump(stage, timedelta(days=1))

    result = shift_traffic(stage.plan())

    assert (result.outcome, result.reason) == ("rolled_back", "lease_expired")
    assert (max(stage.seen), stage.weight) == (25, 0)


def test_25_a_jump_back_never_skips_a_step(stage: Stage) -> None:
    stage.at_tick[MIDDLE] = lambda: jump(stage, timedelta(minutes=-10))

    result = shift_traffic(stage.plan(max_looks_per_step=20))

    assert result.outcome in ("promoted", "rolled_back")
    assert stage.seen == [0, 25, 50, 100][: len(stage.seen)] or stage.seen[-1] == 0
    assert stage.weight == (100 if result.outcome == "promoted" else 0)


def becomes(stage: Stage, status: DeploymentStatus) -> None:
    """Set the candidate's status in the database; the pipeline sees the status only and not the processes."""
    table = tables.deployments
    change = table.update().where(table.c.id == stage.candidate).values(status=status)
    with stage.service.database.write() as connection:
        connection.execute(change)


DEATHS = {
    "failed": lambda stage: becomes(stage, DeploymentStatus.FAILED),
    "deleting": lambda stage: becomes(stage, DeploymentStatus.DELETING),
    "forced-delete": lambda stage: stage.direct.deployments.delete(stage.candidate, force=True),
}


@pytest.mark.parametrize("die", DEATHS.values(), ids=DEATHS)
def test_26_a_candidate_that_dies_at_its_first_share_gets_nothing_any_more(
    stage: Stage, die: Callable[[Stage], object]
) -> None:
    stage.at_tick[MIDDLE] = lambda: die(stage)

    result = shift_traffic(stage.plan())

    assert (result.outcome, result.reason) == ("rolled_back", "candidate_failed")
    assert (max(stage.seen), stage.weight) == (25, 0)
    assert stage.ticks <= MIDDLE + 2, "within one look"


LOST = {"acted": cut_request(1), "unheard": reset_unheard}


@pytest.mark.parametrize("fault", LOST.values(), ids=LOST)
def test_27_a_split_converges_without_the_answers_to_its_changes(
    stage: Stage, fault: Fault
) -> None:
    answers = [fault, passed] if fault is reset_unheard else [fault]
    stage.proxy.play("PATCH", "/v1/canary-endpoints/[^/]+", answers * 3)

    result = shift_traffic(stage.plan())

    assert result.outcome == "promoted"
    assert stage.seen == [0, 25, 50, 100]
    assert [change.weights[stage.candidate] for change in result.history] == [25, 50, 100]


def test_27_a_server_that_cannot_be_read_is_reported_the_same_again(
    prefect_api: None, records: Path
) -> None:
    with FakeService(extensions=False) as bare, Proxy(int(bare.url.rpartition(":")[2])) as proxy:
        connect(ClientSettings(url=f"http://127.0.0.1:{proxy.port}", api_key="k", client_id="t"))
        proxy.play("PATCH", ANY, [cut_request(1), passed, reset_unheard, passed, cut_request(1)])

        result = shift_traffic(plan(quality_gates=None, steps=[25, 50, 100], bake_weight=None))

        assert result.outcome == "promoted"
        applied = [patch.weights[CANDIDATE] for patch in bare.patches if len(patch.weights) == 2]
        assert applied[:5] == [25, 25, 50, 100, 100]
        disconnect()
