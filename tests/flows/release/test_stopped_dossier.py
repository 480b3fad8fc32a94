"""A release that its run did not end leaves a result, a model card and a dossier, too, which name the outcome."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flows
from flows.forms.release_form import ReleaseParameters
from flows.guard import guard
from flows.release.record_file import ReleaseRecords
from flows.release.result import ReleaseResult
from flows.rollout.result import RollbackIncomplete
from flows.tune_and_deploy import tune_and_deploy
from flows.upkeep.guard_form import GuardResult, GuardRules
from tests.flows.conftest import environment_for, wait_for
from tests.flows.release.test_retrain import release, write
from tests.support.fakes.canary_service import Refusal
from tests.support.fakes.whole_service import WholeService
from tuneship.cli.main import app
from tuneship.contract.model_card import ModelCard

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
AT_ONCE = GuardRules(silence_seconds=0, release_silence_hours=0, watch=False)
STATED = "coders"
MANY = 10_000
SLOW = {
    "look_every_seconds": 0.3,
    "min_looks_per_step": MANY,
    "max_looks_per_step": MANY,
    "max_looks": MANY,
}


@pytest.fixture
def dossiers(service: WholeService, records: Path, tmp_path: Path) -> "Dossiers":
    return Dossiers(service, records, tmp_path)


class Dossiers:
    """A service, and the dossiers of the releases on it."""

    def __init__(self, service: WholeService, records: Path, folder: Path) -> None:
        self.service, self.folder = service, folder
        self.records, self.reports = ReleaseRecords(records), folder / "reports"

    def release(self, **canary: Any) -> ReleaseParameters:
        file = write(self.folder / "data" / "a.jsonl", 0, 80)
        fields = release(self.folder, files=[str(file)]).model_dump(exclude_unset=True)
        fields["model_card"] = {"users": STATED}
        fields["canary"] |= canary
        return ReleaseParameters.model_validate(fields)

    def verified(self) -> tuple[ReleaseResult, str]:
        """Make and verify the dossier of the only release; returns its result, and what the verification says."""
        [record] = list(self.records)
        result_file, dossier = (
            self.reports / record.path.stem / "result.json",
            self.folder / "d.zip",
        )
        words = ["-o", str(dossier), "--overwrite", "--no-audit-head"]
        made = CliRunner().invoke(app, ["releases", "dossier", str(result_file), *words])
        assert made.exit_code == 0, made.output
        said = CliRunner().invoke(app, ["releases", "verify", str(dossier)])
        # Nothing is wrong, and it has no audit head.
        assert said.exit_code == 5, said.output
        result = ReleaseResult.model_validate_json(result_file.read_bytes())
        card = ModelCard.model_validate_json(Path(str(result.model_card)).read_bytes())
        assert card.decisions is not None
        assert (card.decisions.outcome, card.decisions.reason) == (result.outcome, result.reason)
        assert card.statements.users == STATED
        assert STATED not in record.path.read_text() + result_file.read_text()
        return result, said.output

    def killed_at(self, step: int) -> None:
        """Run a release as a script that is killed when the candidate has this share."""
        params = self.folder / "release.json"
        wanted = self.release(steps=[step, 100], **SLOW)
        params.write_text(wanted.model_dump_json(exclude_unset=True))
        script = Path(str(flows.__file__)).with_name("tune_and_deploy.py")
        words = [sys.executable, str(script), "--params", str(params)]
        with subprocess.Popen(words, env=environment_for(self.service)) as process:
            wait_for(lambda: step in self.service.weights.values())
            process.kill()


def test_a_release_that_failed(dossiers: Dossiers) -> None:
    def refuse(rest: list[str], body: Any) -> Any:
        raise Refusal(422, "validation_error", "no room")

    dossiers.service._deploy = refuse
    with pytest.raises(Exception, match="no room"):
        tune_and_deploy(dossiers.release())

    result, said = dossiers.verified()
    assert (result.outcome, result.reason) == ("aborted", "failed")
    assert result.job_id in dossiers.service.jobs
    assert ": aborted (failed)" in said
    assert f"decided again as recorded: {len(result.training_gates)} training gates" in said


def test_a_release_whose_rollback_is_incomplete_and_then_returned(dossiers: Dossiers) -> None:
    dossiers.service.patch_script = ["ok"] + ["fail"] * 1000
    with pytest.raises(RollbackIncomplete):
        tune_and_deploy(dossiers.release())

    result, said = dossiers.verified()
    assert result.outcome == "rollback_incomplete"
    assert f": rollback_incomplete ({result.reason})" in said
    assert "checks of the rollout" in said
    [record] = list(dossiers.records)
    assert not record.has_ended

    dossiers.service.patch_script = []
    closed: list[str] = []
    # The guard leaves a rollout alone until three looks have been missed.
    wait_for(lambda: closed.extend(guard(AT_ONCE).releases) or closed)
    assert closed == [record.run_key]
    result, said = dossiers.verified()
    assert (result.outcome, result.candidate_deleted) == ("rolled_back", True)
    assert f": rolled_back ({result.reason})" in said


def test_a_release_that_was_killed_in_its_rollout(dossiers: Dossiers) -> None:
    dossiers.killed_at(50)
    closed: list[GuardResult] = []

    def is_closed() -> bool:
        closed.append(guard(AT_ONCE))
        return bool(closed[-1].releases)

    wait_for(is_closed)
    result, said = dossiers.verified()
    assert (result.outcome, result.reason) == ("aborted", "abandoned")
    assert result.candidate_deleted
    assert result.history
    assert ": aborted (abandoned)" in said
    assert "checks of the rollout" in said
    assert "training gates" in said
