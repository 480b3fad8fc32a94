"""The demo's four acts run with fewer rows, and without latency gates because test machines are busy."""

import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from tests.end_to_end.conftest import ROOT, SURROUNDINGS
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.essential, pytest.mark.long]


def test_a_release_is_promoted_and_bad_data_behaviour_and_answers_are_stopped(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "demo"
    command = [sys.executable, "examples/demo.py", "--folder", str(folder)]
    run = subprocess.run(
        [*command, "--rows", "400", "--busy"],
        cwd=ROOT,
        env={**SURROUNDINGS, "TUNESHIP_PRELOAD_TRAINING": "true"},  # the default
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    good, data, behaviour, answers = (
        json.loads((folder / f"act{number}-result.json").read_text()) for number in (1, 2, 3, 4)
    )
    assert good["outcome"] == "promoted"
    grader = good["evaluation"]["graders"][0]
    assert grader["candidate"]["score"] > grader["baseline"]["score"]
    assert (data["outcome"], data["gate"]) == ("rejected", "T4 champion")
    assert data["candidate_deployment_id"] is None
    assert (behaviour["outcome"], behaviour["reason"]) == ("rolled_back", "error_rate")
    assert behaviour["candidate_deleted"]
    assert (answers["reason"], answers["gate"]) == ("evaluation", "T12 evaluation")
    assert answers["candidate_deleted"]
    _check_weights(good["history"], good["candidate_deployment_id"])
    schema = json.loads((ROOT / "docs" / "model_card.schema.json").read_text())
    for result in (good, data, behaviour, answers):
        assert Path(result["report"]).is_file()
        card = json.loads(Path(result["model_card"]).read_text())
        jsonschema.validate(card, schema)
        assert card["decisions"]["outcome"] == result["outcome"]
        assert [one["value"] for one in card["decisions"]["gates"]] == [
            one["value"] for one in result["training_gates"]
        ]
    card = json.loads(Path(good["model_card"]).read_text())
    assert card["model"]["base_licence"] == "apache-2.0"
    named = {"name", "candidate", "baseline", "wins", "losses", "difference", "low", "high"}
    assert {one: card["evaluation"]["graders"][0][one] for one in named} == {
        one: grader[one] for one in named
    }
    _replay(folder, [good, behaviour])
    until(lambda: not _left_running(folder))


def _replay(folder: Path, results: list[dict[str, str]]) -> None:
    """Decide every look of these rollouts again, when their service is gone."""
    for result in results:
        (record,) = folder.glob(f"**/{result['rollout_id']}.jsonl")
        command = [sys.executable, "-m", "tuneship.cli.main", "rollouts", "replay", str(record)]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        assert f"checks decide as they are recorded; {result['outcome']}" in run.stdout


def _check_weights(history: list[dict[str, dict[str, int]]], candidate: str) -> None:
    """Check that the shares add up to 100 at every step, and that the candidate's share only rises to 100."""
    shares = [change["weights"][candidate] for change in history]
    assert all(sum(change["weights"].values()) == 100 for change in history)
    assert shares == sorted(shares)
    assert shares[-1] == 100


def _left_running(folder: Path) -> list[str]:
    """Ids of running processes that name the demo's folder in their arguments or environment."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text:
            found.append(process.name)
    return found
