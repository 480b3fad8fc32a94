"""Jobs at the same time train on different GPUs, played by a folder of the kernel's driver."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.service.in_process import Service
from tuneship.host import gpus, machine
from tuneship.training.spec import SPEC_FILE, TrainingSpec

Start = Callable[..., Service]


@pytest.fixture
def start_with_gpus(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start a service on a machine with two GPUs."""
    for number in range(2):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path / "gpus")
    monkeypatch.setattr(gpus, "DEVICES", tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return start


def spec_of(service: Service, number: int) -> TrainingSpec:
    folder: Path = service.trainer(number).folder
    return TrainingSpec.from_json((folder / SPEC_FILE).read_text())


def test_jobs_at_the_same_time_get_different_gpus_as_long_as_there_are_some(
    start_with_gpus: Start,
) -> None:
    service = start_with_gpus(concurrent_jobs=3)
    for number in range(3):
        service.job(model_name=f"m{number}")
    specs = [spec_of(service, number) for number in range(3)]
    assert sorted(one.gpus for one in specs[:2]) == [("0",), ("1",)]
    assert [one.shares_gpus for one in specs] == [False, False, True]
    ended = specs.index(next(one for one in specs[:2] if one.gpus == ("1",)))
    service.trainer(ended).start_of(2)
    service.trainer(ended).complete()
    job_id = service.trainer(ended).folder.parent.name
    service.until(lambda: service.job_status(job_id) == "completed")
    service.job(model_name="next")
    assert (spec_of(service, 3).gpus, spec_of(service, 3).shares_gpus) == (("1",), False)


@pytest.mark.parametrize(("agents", "taken"), [("local", ("0",)), ("ray", ())])
def test_a_cluster_says_itself_which_gpus_its_agents_get(
    start_with_gpus: Start, tmp_path: Path, agents: str, taken: tuple[str, ...]
) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    ray = {"ray_urls": ("http://127.0.0.1:1",), "ray_token_file": token}
    service = start_with_gpus(agents=agents, **(ray if agents == "ray" else {}))
    service.job()
    assert spec_of(service, 0).gpus == taken


@pytest.mark.parametrize(("batch_size", "taken"), [(1, ("0",)), (8, ("0", "1"))])
def test_a_job_takes_no_more_gpus_than_it_can_use(
    start_with_gpus: Start, batch_size: int, taken: tuple[str, ...]
) -> None:
    service = start_with_gpus(training_devices=4)
    service.job(hyperparameters={"batch_size": batch_size})
    assert spec_of(service, 0).gpus == taken


def test_a_job_on_a_machine_without_gpus_names_none(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    service = start(concurrent_jobs=2)
    service.job()
    service.job()
    for number in range(2):
        spec = spec_of(service, number)
        assert (spec.gpus, spec.shares_gpus) == ((), False)


def test_a_spec_of_an_earlier_version_names_no_gpus(start: Start) -> None:
    service = start()
    service.job()
    fields: dict[str, Any] = json.loads(spec_of(service, 0).to_json())
    del fields["gpus"], fields["shares_gpus"]
    assert TrainingSpec.from_json(json.dumps(fields)).gpus == ()
