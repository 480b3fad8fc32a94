"""`tuneship jobs export` writes an ended job of a real service into a tracker, and says what keeps it from that."""

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from typer.testing import CliRunner, Result

from tests.support.service.in_process import LINES, Service
from tuneship.cli.main import app


@pytest.fixture
def environment(service: Service, tmp_path: Path) -> dict[str, str]:
    service.listen()
    return {
        "TUNESHIP_URL": service.url,
        "TUNESHIP_API_KEY": service.headers["alice"]["Authorization"].removeprefix("Bearer "),
        "TUNESHIP_CLIENT_ID": "alice",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }


def export(environment: dict[str, str], *words: str) -> Result:
    return CliRunner().invoke(app, ["jobs", "export", *words], env=environment)


@pytest.mark.slow
def test_an_ended_job_is_written_with_its_curves_and_no_text(
    service: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    job = service.job()
    trainer = service.trainer_of(job)
    trainer.start_of(2)
    trainer.step(1, loss=2.5)
    trainer.step(2, loss=1.5)
    trainer.complete()
    service.until(lambda: service.job_status(job) == "completed")
    done = export(environment, job, "--to", "tensorboard", "--place", str(tmp_path), "--json")
    assert done.exit_code == 0, done.output
    place = Path(json.loads(done.stdout)["place"])
    events = EventAccumulator(str(place.parent))
    events.Reload()
    assert [one.step for one in events.Tensors("training_loss")] == [1, 2]
    content = place.read_bytes()
    for line in LINES:
        for text in line.values():
            assert str(text).encode() not in content


def test_a_job_that_has_not_ended_is_refused(
    service: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    job = service.job()
    done = export(environment, job, "--to", "tensorboard", "--place", str(tmp_path / "logs"))
    assert done.exit_code == 1
    assert "only a job that has ended is tracked" in done.stderr
    assert not (tmp_path / "logs").exists()


def test_without_a_place_the_setting_is_named(environment: dict[str, str]) -> None:
    done = export(environment, "ft_1", "--to", "wandb")
    assert done.exit_code == 1
    assert done.stderr == "tuneship: --place is needed, or TUNESHIP_WANDB_DIR\n"


def test_an_address_with_credentials_is_refused_without_them(environment: dict[str, str]) -> None:
    done = export(environment, "ft_1", "--to", "mlflow", "--place", "http://me:secret@host")
    assert done.exit_code == 1
    assert "must hold no credentials" in done.stderr
    assert "secret" not in done.output
