"""A training that is asked to measures each validation row under the base model, its own model and another one."""

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.unit.training.conftest import write_rows
from tuneship.contract.reports.job_reports import RowLosses
from tuneship.training.progress_file import ProgressFile, StopRequest
from tuneship.training.spec import DataKeys

if TYPE_CHECKING:
    from tests.unit.training.conftest import Job, JobMaker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]
ROWS = 33


def run(job: "Job") -> list[dict[str, Any]]:
    """Run the job in this process, and return its lines with losses by row."""
    from tuneship.training.training_loop import train

    with closing(ProgressFile(job.directory / "progress.jsonl")) as progress:
        train(job.spec, DataKeys(), progress, StopRequest(job.directory / "cancel"))
    return job.of_kind("row_losses")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Write validation rows, of which the first three are training rows, too."""
    return write_rows(tmp_path / "rows.jsonl", ROWS)


def test_rows_are_measured_under_the_base_the_served_and_another_adapter(
    make_job: "JobMaker", rows: Path
) -> None:
    other = make_job(
        validation_file=rows, comparison_seed=5, target_modules=("q_proj",), lora_rank=2
    )
    job = make_job(
        validation_file=rows,
        comparison_seed=5,
        compared_adapter=other.adapter,
        compared_model="ft:tiny:other:1",
    )
    theirs = RowLosses.model_validate(run(other)[0]["losses"])
    ours = RowLosses.model_validate(run(job)[0]["losses"])

    assert ours.rows == list(range(1, ROWS + 1))
    assert sum(ours.judge) == 2 * ROWS // 3
    assert (ours.judge, ours.start) == (theirs.judge, theirs.start)
    assert (theirs.compared, theirs.compared_model) == (None, None)
    assert ours.compared_model == "ft:tiny:other:1"
    np.testing.assert_allclose(np.array(ours.compared), np.array(theirs.served), atol=2e-4)
    assert np.abs(np.array(ours.served) - np.array(ours.compared)).max() > 0.01
    # The rows of `write_rows` are those of the training file, as far as that goes.
    assert all(ours.trained_on)
    # The curve holds the rows that choose, and they alone.
    best = job.of_kind("completed")[0]["validation_loss"]
    chosen = [loss for loss, judges in zip(ours.served, ours.judge, strict=True) if not judges]
    assert np.mean(np.array(chosen, float)) == pytest.approx(best, rel=0.1)


def test_an_adapter_that_is_gone_costs_the_comparison_and_not_the_job(
    make_job: "JobMaker", rows: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    job = make_job(
        validation_file=rows, comparison_seed=1, compared_adapter=gone, compared_model="ft:tiny:x:1"
    )
    losses = RowLosses.model_validate(run(job)[0]["losses"])
    assert (losses.compared, losses.compared_model) == (None, None)
    assert "FileNotFoundError" in job.of_kind("log")[-1]["message"]
    assert job.of_kind("completed")


def test_few_rows_all_choose_and_none_is_reported(make_job: "JobMaker") -> None:
    assert run(make_job(comparison_seed=1)) == []
