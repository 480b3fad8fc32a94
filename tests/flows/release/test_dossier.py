"""The dossier of a real release holds all that its decisions rest on, and whatever is changed in it is named."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.forms.release_form import ReleaseParameters
from flows.tune_and_deploy import tune_and_deploy
from tests.support.service.evaluations import PLANTED, PlayedAnswers, rows
from tests.support.service.in_process import jsonl
from tests.system.faults.stage import Stage, Trainings
from tuneship.cli.main import app
from tuneship.dossier.archive import pack, unpack
from tuneship.dossier.contents import MEMBERS

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

EXAMPLES = 300


@dataclass
class Released:
    """A service on which releases run, and the folder with their results."""

    stage: Stage
    played: PlayedAnswers
    folder: Path
    environment: dict[str, str]

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(app, ["releases", *words], env=self.environment)

    def release(self, name: str) -> Path:
        """Train and release a model on planted texts; returns the result file."""
        for file, lines in (("train", rows(80)), ("held-out", rows(EXAMPLES))):
            (self.folder / f"{file}.jsonl").write_bytes(jsonl(*lines))
        plan = self.stage.plan(candidate_deployment_id="none").model_dump(exclude_unset=True)
        pair = ("endpoint_id", "baseline_deployment_id", "candidate_deployment_id")
        parameters = {
            "model_name": name,
            "data": {"files": [str(self.folder / "train.jsonl")]},
            "training_gates": {"min_validation_examples": 1},
            "endpoint": {"id": self.stage.endpoint},
            "evaluation": {
                "file": str(self.folder / "held-out.jsonl"),
                "graders": [{"name": "chapter", "type": "string_check"}],
                "slice_by": ["site"],
                "margin": 0.08,
            },
            "canary": {field: value for field, value in plan.items() if field not in pair},
        }
        result = tune_and_deploy(ReleaseParameters.model_validate(parameters))
        file = self.folder / f"{name}.json"
        file.write_text(json.dumps(result.model_dump(mode="json"), indent=2) + "\n")
        return file


@pytest.fixture(scope="module")
def released(
    prefect_api: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Released]:
    folder = tmp_path_factory.mktemp("released")
    with pytest.MonkeyPatch.context() as patch, Stage(folder) as stage:
        patch.setenv("TUNESHIP_RECORDS", str(folder / "records"))
        patch.setenv("TUNESHIP_REPORTS", str(folder / "reports"))
        played = PlayedAnswers(stage.service)
        stage.baseline = played.baseline
        stage._open({stage.baseline: 100})
        key = stage.service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        environment = {
            "TUNESHIP_URL": stage.service.url,
            "TUNESHIP_API_KEY": key,
            "TUNESHIP_CLIENT_ID": "alice",
        }
        # That of the model which is played; every later one is a release's.
        stage.service.engines.trainers.clear()
        with Trainings(stage):
            yield Released(stage, played, folder, environment)


def test_it(released: Released) -> None:
    file = released.release("first")
    print(json.dumps({k:v for k,v in json.loads(file.read_text()).items() if k not in("decisions",)}, indent=1)[:6000])
    out = file.with_suffix(".zip")
    done = released.run("dossier", str(file), "-o", str(out))
    print(done.output, done.stderr)
    assert done.exit_code == 0
    done = released.run("verify", str(out), "--online")
    print(done.output, done.stderr)
    assert done.exit_code == 0
