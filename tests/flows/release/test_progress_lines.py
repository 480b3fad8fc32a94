"""The lines of a release while it works are in words: of a job, and of the checks of its rollout."""

import re
from pathlib import Path

import pytest

from flows.tune_and_deploy import tune_and_deploy
from tests.flows.release.test_retrain import release, write
from tests.support.fakes.whole_service import WholeService
from tuneship.prefect.progress import TaskProgress

pytestmark = [pytest.mark.prefect, pytest.mark.slow]


def test_the_lines_of_a_release_name_the_last_validation_loss_and_why_a_check_holds(
    service: WholeService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TaskProgress] = []
    monkeypatch.setattr("tuneship.prefect.progress._listeners", [seen.append])
    file = write(tmp_path / "data" / "a.jsonl", 0, 80)
    assert tune_and_deploy(release(tmp_path, files=[str(file)])).outcome == "promoted"
    said = {
        work: [one.detail for one in seen if one.work == work] for work in ("training", "canary")
    }
    assert "  last validation loss 1.000" in said["training"][-1]
    assert any(re.search(r": hold, \w+ \w+ \w+", one) for one in said["canary"]), said["canary"]
    assert any(": advance" in one for one in said["canary"])
    for one in said["canary"]:
        assert "_" not in one
        assert "look" not in one
        assert "none" not in one
