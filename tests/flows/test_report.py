"""The report: numbers with their limits, pictures that can be opened, and no text of a dataset."""

import json
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.outcome import Change
from flows.parameters import ReleaseParameters
from flows.plots import plot_losses, plot_rollout
from flows.release_result import Accuracy, ReleaseResult
from flows.report import report, summary, with_pictures
from tuneship.contract.jobs import JobMetrics
from tuneship.gates.series import read_series

START = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
RELEASE = ReleaseParameters.model_validate_json(
    json.dumps(
        {"model_name": "chapters", "endpoint": {"name": "shop"}, "data": {"files": ["a.jsonl"]}}
    )
)
HISTORY = [
    Change(
        at=START + timedelta(seconds=at), weights={"dep_b": 100 - share, "dep_c": share}, why=why
    )
    for at, share, why in ((0, 10, "first step"), (20, 50, "advance"), (40, 0, "error_rate"))
]


def refused() -> ReleaseResult:
    gate = {"name": "T4 champion", "state": "reject", "value": 0.5, "limit": 0.3, "note": "a|b"}
    return ReleaseResult(
        outcome="rejected",
        reason="training_gate",
        gate="T4 champion",
        training_gates=[gate],
        run_key="k",
        accuracy=Accuracy(rows=200, before=0, after=100),
    )


def answer(errors: int, buckets: int = 6) -> dict[str, Any]:
    """Buckets of a second, as the service tells them."""
    times = [(START + timedelta(seconds=i)).isoformat() for i in range(buckets)]
    same = {"timestamps": times, "complete": [True] * buckets}
    return {
        "deployment_id": "dep",
        "start_time": times[0],
        "end_time": (START + timedelta(seconds=buckets)).isoformat(),
        "interval": "1s",
        "metrics": {
            "throughput": {**same, "requests_per_second": [2.0] * buckets},
            "error_rate": {
                **same,
                "percentage": [5.0 * errors] * buckets,
                "request_count": [20] * buckets,
                "error_count": [errors] * buckets,
            },
            "latency": {
                **same,
                "p50": [100.0] * buckets,
                "p95": [200.0] * buckets,
                "p99": [300.0] * buckets,
            },
        },
    }


def size(picture: Path) -> tuple[int, int]:
    """Width and height from a PNG's header."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:24])


def test_a_refusal_names_the_gate_and_its_numbers_beside_the_limit() -> None:
    text = report(refused(), RELEASE, [])
    assert "gate `T4 champion`" in text
    assert "| T4 champion | reject | 0.5 | 0.3 | a\\|b |" in text


def test_the_summary_tells_accuracy_and_leaves_out_what_was_not_reached() -> None:
    rows = {row["what"]: row["value"] for row in summary(refused(), RELEASE)}
    assert rows["exact match after"] == "100 of 200 (50.0 %)"
    assert "candidate deployment" not in rows


def test_the_loss_picture_is_drawn_with_nulls_and_a_champion(tmp_path: Path) -> None:
    metrics = JobMetrics(
        job_id="ft_1",
        steps=[1, 2, 3],
        training_loss=[2.0, None, 1.0],
        validation_loss=[None, 1.5, 1.5],
        learning_rate=[0.1, 0.1, 0.1],
        epochs=[0.3, 0.6, 1.0],
        accuracy=[None, None, None],
        perplexity=[None, None, None],
        created_at=START,
    )
    plot_losses(metrics, 1.2, tmp_path / "loss.png")
    assert size(tmp_path / "loss.png") == (880, 440)


@pytest.mark.parametrize("buckets", [1, 6, 41, 83, 1001])
def test_the_rollout_picture_shows_both_arms_of_any_length(tmp_path: Path, buckets: int) -> None:
    series = read_series(answer(0, buckets), answer(4, buckets), "1s")
    assert plot_rollout(HISTORY, series, "dep_c", tmp_path / "rollout.png")
    assert size(tmp_path / "rollout.png") == (880, 880)


def test_the_rollout_picture_is_drawn_when_the_metrics_are_gone(tmp_path: Path) -> None:
    assert plot_rollout(HISTORY, None, "dep_c", tmp_path / "rollout.png")


def test_without_any_time_there_is_no_rollout_picture(tmp_path: Path) -> None:
    timeless = [Change(at=None, weights={"dep_c": 10}, why="first step")]
    assert not plot_rollout(timeless, None, "dep_c", tmp_path / "rollout.png")
    assert not (tmp_path / "rollout.png").exists()


def test_the_pictures_of_the_prefect_page_stand_in_its_text(tmp_path: Path) -> None:
    (tmp_path / "loss.png").write_bytes(b"\x89PNG")
    text = with_pictures("# A\n\n![Loss curves](loss.png)\n\n[a link](other.md)\n", tmp_path)
    assert text == "# A\n\n![Loss curves](data:image/png;base64,iVBORw==)\n\n[a link](other.md)\n"
