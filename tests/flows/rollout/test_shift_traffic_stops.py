"""A stopped rollout returns its traffic; after SIGKILL it leaves a record from which it can be resumed."""

import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelled, Crashed, Failed

from flows.rollout.record_file import RecordFolder
from flows.rollout.rollback import return_traffic, stopping_signal
from flows.rollout.traffic_driver import TrafficDriver
from flows.shift_traffic import shift_traffic
from tests.flows.conftest import PATIENCE_S, STANDS_STILL, Script, plan, slow_plan, wait_for
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, Arm, FakeService
from tests.support.repeats import variants
from tuneship.gates.plan import CanaryPlan

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_in_mid_canary_returns_the_traffic_before_the_process_ends(
    fake: FakeService, run: Callable[[CanaryPlan], Script], number: signal.Signals, code: int
) -> None:
    script = run(slow_plan())
    wait_for(lambda: fake.weights.get(CANDIDATE) == 50)

    script.process.send_signal(number)

    assert script.process.wait(PATIENCE_S) == code
    assert fake.weights == {BASELINE: 100, CANDIDATE: 0}
    assert fake.endpoint is not None
    assert fake.endpoint["lease"] is None
    assert (script.read_result()["outcome"], script.read_result()["reason"]) == (
        "aborted",
        "cancelled",
    )
    assert fake.deleted == []


def test_a_killed_run_is_resumed_where_it_stopped(
    fake: FakeService, run: Callable[[CanaryPlan], Script]
) -> None:
    wanted = slow_plan()
    script = run(wanted)
    wait_for(lambda: fake.weights.get(CANDIDATE) == 50)
    script.process.kill()
    script.process.wait()
    assert fake.weights[CANDIDATE] == 50
    fake.tick(2)

    result = shift_traffic(wanted)

    assert result.outcome == "promoted"
    assert fake.created == 1
    assert [patch.weights.get(CANDIDATE) for patch in fake.patches] == [5, 50, 80, 100]
    looks = [decision["look"] for decision in result.decisions]
    assert looks == list(range(1, len(looks) + 1))


def test_the_second_of_two_runs_at_once_is_refused_and_moves_nothing(
    fake: FakeService, run: Callable[[CanaryPlan], Script]
) -> None:
    wanted = slow_plan(look_every_seconds=STANDS_STILL)
    run(wanted)
    wait_for(lambda: fake.weights.get(CANDIDATE) == 5)
    moved = len(fake.patches)

    result = shift_traffic(wanted)

    assert (result.outcome, result.reason) == ("rejected", "rollout_in_progress")
    assert len(fake.patches) == moved


def test_a_run_with_records_elsewhere_is_refused_by_the_service(
    fake: FakeService,
    run: Callable[[CanaryPlan], Script],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = slow_plan(look_every_seconds=STANDS_STILL)
    run(wanted)
    wait_for(lambda: fake.weights.get(CANDIDATE) == 5)
    monkeypatch.setenv("TUNESHIP_RECORDS", str(tmp_path / "another-host"))

    result = shift_traffic(wanted)

    assert (result.outcome, result.reason) == ("rejected", "rollout_in_progress")
    assert fake.weights == {BASELINE: 95, CANDIDATE: 5}


@pytest.mark.parametrize("state", variants([Crashed(), Cancelled(), Failed()]))
def test_the_hook_returns_what_a_killed_run_left(
    fake: FakeService, run: Callable[[CanaryPlan], Script], state: Any
) -> None:
    wanted = slow_plan(look_every_seconds=STANDS_STILL)
    script = run(wanted)
    wait_for(lambda: fake.weights.get(CANDIDATE) == 5)
    flow_run = FlowRun(flow_id=uuid4(), parameters={"plan": wanted.model_dump(mode="json")})

    return_traffic(flow=shift_traffic, flow_run=flow_run, state=state)
    assert fake.weights[CANDIDATE] == 5, "a run that is alive is left alone"

    script.process.kill()
    script.process.wait()
    for _ in range(2):
        return_traffic(flow=shift_traffic, flow_run=flow_run, state=state)
    assert fake.weights == {BASELINE: 100, CANDIDATE: 0}
    assert len(fake.patches) == 2, "the second time nothing is left to do"


def test_the_hook_never_reverts_a_promoted_endpoint(fake: FakeService, records: Path) -> None:
    wanted = plan(steps=[50, 100])
    assert shift_traffic(wanted).outcome == "promoted"
    flow_run = FlowRun(flow_id=uuid4(), parameters={"plan": wanted.model_dump(mode="json")})

    return_traffic(flow=shift_traffic, flow_run=flow_run, state=Crashed())

    assert fake.weights[CANDIDATE] == 100
    assert not RecordFolder(records, fake.url).of(wanted)[-1].is_open


def test_an_unexpected_error_returns_the_traffic_and_is_not_hidden(
    fake: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    fake.at_tick[8] = lambda: monkeypatch.setattr("flows.shift_traffic.look_once", break_down)

    with pytest.raises(ZeroDivisionError):
        shift_traffic(plan(steps=[50, 100]))

    assert fake.weights == {BASELINE: 100, CANDIDATE: 0}


@pytest.mark.parametrize("breaks", [False, True], ids=["to its end", "by an error"])
def test_open_answers_are_waited_for_after_the_end_is_recorded(
    fake: FakeService, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: bool
) -> None:
    """Cut off, they would count as abandoned requests of the next release's baseline."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    traffic = {"prompts": str(prompts), "requests_per_second": 200.0, "max_in_flight": 4}
    wanted = plan(steps=[50, 100], traffic=traffic)
    fake.generation_gate = gate = threading.Event()
    drivers: list[TrafficDriver] = []
    stopped: list[bool] = []

    class WatchedDriver(TrafficDriver):
        def __enter__(self) -> Self:
            drivers.append(self)
            return super().__enter__()

        def __exit__(self, *error: object) -> None:
            wait_for(lambda: fake.waiting == 4)
            stopped.append(RecordFolder(records, fake.url).of(wanted)[-1].is_open)
            threading.Timer(0.5, gate.set).start()
            super().__exit__(*error)

    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("flows.shift_traffic.TrafficDriver", WatchedDriver)
    if breaks:
        fake.at_tick[8] = lambda: monkeypatch.setattr("flows.shift_traffic.look_once", break_down)

    with pytest.raises(ZeroDivisionError) if breaks else nullcontext():
        shift_traffic(wanted)

    assert fake.weights[CANDIDATE] == (0 if breaks else 100)
    assert stopped == [False], "the record was open when the driver was stopped"
    counts = drivers[0].counts.take(BASELINE, CANDIDATE)
    assert counts.baseline_requests + counts.candidate_requests == 4


def test_a_signal_is_not_lost_in_the_error_that_it_caused() -> None:
    masked = ValueError("set up was interrupted")
    masked.__context__ = KeyboardInterrupt()
    assert stopping_signal(masked) is masked.__context__

    plain = ValueError("alone")
    assert stopping_signal(plain) is plain


@pytest.mark.parametrize("since", [80, 100])
def test_a_candidate_that_fails_during_the_bake_is_returned(fake: FakeService, since: int) -> None:
    fake.arms[CANDIDATE] = Arm(error_share=lambda _, weight: 0.5 if weight >= since else 0.003)

    result = shift_traffic(plan(steps=[50, 100]))

    assert (result.outcome, result.reason) == ("rolled_back", "error_rate")
    assert fake.weights == {BASELINE: 100, CANDIDATE: 0}
    assert fake.deleted == []
