"""Faults 23 and 28 hit whole releases against the real service: these tests check what was created and what remains."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL

from flows.forms.release_form import ReleaseParameters
from flows.shift_traffic import shift_traffic
from flows.tune_and_deploy import tune_and_deploy
from tests.support.fakes.proxy import Exchange
from tests.support.service.engines import PlayedTrainer
from tests.support.service.in_process import jsonl
from tests.system.faults.chain import OpenFlow
from tests.system.faults.stage import Stage, Trainings

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
PATIENCE_S = 600.0
ROWS = 40


@pytest.fixture
def stage(prefect_api: None, records: Path, tmp_path: Path) -> Iterator[Stage]:
    """Set up a service whose baseline has all traffic."""
    with Stage(tmp_path) as created:
        created.set_up_alone()
        yield created


@pytest.fixture
def trainings(stage: Stage) -> Iterator[Trainings]:
    """Simulate every training as soon as its job starts."""
    with Trainings(stage) as playing:
        yield playing


def release(stage: Stage, folder: Path) -> ReleaseParameters:
    """Return a release of two files, so that there is something to merge, with few and quick looks."""
    for name in ("a", "b"):
        rows = [{"instruction": f"case {name}{n}", "response": f"answer {n}"} for n in range(ROWS)]
        (folder / f"{name}.jsonl").write_bytes(jsonl(*rows))
    plan = stage.plan(candidate_deployment_id="none").model_dump(exclude_unset=True)
    pair = ("endpoint_id", "baseline_deployment_id", "candidate_deployment_id")
    return ReleaseParameters.model_validate(
        {
            "model_name": "m",
            "data": {"files": [str(folder / "a.jsonl"), str(folder / "b.jsonl")]},
            "training_gates": {"min_validation_examples": 1},
            "endpoint": {"id": stage.endpoint},
            "evaluation": {"max_examples": 0, "max_tokens": 8},
            "canary": {name: value for name, value in plan.items() if name not in pair},
        }
    )


def failed(trainer: PlayedTrainer) -> None:
    trainer.say({"kind": "failed", "reason": "out_of_memory", "message": "too big"})
    trainer.code = 1


ENDS: dict[str, Callable[[Stage], Callable[[PlayedTrainer], object]]] = {
    "failed": lambda _: failed,
    "cancelled": lambda stage: lambda _: cancel_all(stage),
}


def cancel_all(stage: Stage) -> None:
    """Cancel every job, as a person would."""
    for job in stage.direct.jobs.list().jobs:
        stage.direct.jobs.cancel(job.id)


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_23_a_job_that_does_not_complete_is_not_deployed(
    stage: Stage,
    trainings: Trainings,
    tmp_path: Path,
    end: Callable[[Stage], Callable[..., object]],
) -> None:
    trainings.ending = end(stage)

    result = tune_and_deploy(release(stage, tmp_path))

    assert (result.outcome, result.reason, result.gate) == (
        "rejected",
        "training_gate",
        "T0 terminal",
    )
    assert len(stage.direct.jobs.list().jobs) == 1
    assert [one.id for one in stage.direct.deployments.list().deployments] == [stage.baseline]
    assert stage.shares() == {stage.baseline: 100}


# Requests of the eight tasks; the process is killed after the service has acted, before it gets the answer.
POINTS = {
    "validate": ("POST", "/v1/datasets/validate"),
    "upload": ("POST", "/v1/datasets"),
    "merge": ("POST", "/v1/datasets/merge"),
    "create-job": ("POST", "/v1/fine-tuning/jobs"),
    "poll-job": ("GET", "/v1/fine-tuning/jobs/[^/]+"),
    "create-deployment": ("POST", "/v1/deployments"),
    "shift": ("PATCH", "/v1/canary-endpoints/[^/]+"),
    "look": ("GET", "/v1/deployments/[^/]+/metrics"),
}


def victim(stage: Stage, parameters: Path) -> "subprocess.Popen[bytes]":
    """Start the release in a process of its own."""
    settings = stage.settings(f"http://127.0.0.1:{stage.proxy.port}")
    command = [sys.executable, str(ROOT / "flows" / "tune_and_deploy.py"), "--params"]
    environment = {
        "TUNESHIP_URL": settings.url,
        "TUNESHIP_API_KEY": settings.api_key.get_secret_value(),
        "TUNESHIP_CLIENT_ID": settings.client_id,
        "PREFECT_API_URL": PREFECT_API_URL.value() or "",
        "PYTHONPATH": str(ROOT),
    }
    with parameters.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [*command, str(parameters)], env=os.environ | environment, stdout=log, stderr=log
        )


def kill_at(stage: Stage, point: tuple[str, str], parameters: Path) -> None:
    """Run the release in its own process and kill it at this point."""
    running: list[subprocess.Popen[bytes]] = []

    async def kill(exchange: Exchange) -> None:
        await exchange.pass_on()
        running[0].kill()

    stage.proxy.play(*point, [kill])
    running.append(victim(stage, parameters))
    code = running[0].wait(PATIENCE_S)
    assert code == -signal.SIGKILL, parameters.with_suffix(".log").read_text()[-2000:]


def test_28_a_release_that_is_killed_at_every_task_makes_one_of_each(
    stage: Stage, trainings: Trainings, tmp_path: Path
) -> None:
    wanted = release(stage, tmp_path)
    parameters = tmp_path / "release.json"
    parameters.write_text(wanted.model_dump_json(exclude_unset=True))
    for point in POINTS.values():
        kill_at(stage, point, parameters)

    result = tune_and_deploy(wanted)

    assert result.outcome == "promoted"
    datasets = stage.direct.datasets.list().datasets
    assert sorted(one.num_examples for one in datasets) == [ROWS, ROWS, 2 * ROWS]
    assert [one.id for one in stage.direct.jobs.list().jobs] == [result.job_id]
    created = {one.id for one in stage.direct.deployments.list().deployments} - {stage.baseline}
    assert created == {result.candidate_deployment_id}
    assert stage.seen == [0, 25, 50, 100], "no step twice, none skipped"


def test_28_of_two_roll_outs_at_once_the_service_refuses_the_second(
    prefect_api: None, records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    def wait() -> None:
        has_begun.set()
        may_go_on.wait(PATIENCE_S)

    with Stage(tmp_path) as stage, OpenFlow() as flow:
        stage.set_up()
        stage.at_tick[3] = wait
        first = flow.start(lambda: shift_traffic(stage.plan()))
        assert has_begun.wait(PATIENCE_S)
        monkeypatch.setenv("TUNESHIP_RECORDS", str(tmp_path / "another-host"))
        stage.proxy.heal()

        second = shift_traffic(stage.plan())

        assert (second.outcome, second.reason) == ("rejected", "rollout_in_progress")
        assert stage.weight == 25
        stage.let_looks_tick()
        may_go_on.set()
        assert first.result(PATIENCE_S).outcome == "promoted"
        assert stage.seen == [0, 25, 50, 100]
