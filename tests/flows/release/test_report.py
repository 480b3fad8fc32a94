"""The report shows numbers beside their limits and pictures that can be opened, but no text of a dataset."""

import json
import struct
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import scipy.stats
from matplotlib.figure import Figure

from flows.forms.release_form import ReleaseParameters
from flows.release.loss_limits import Limit
from flows.release.reports.plots import plot_losses, plot_rollout
from flows.release.reports.report import report, summary, with_pictures
from flows.release.reports.tracked import measures
from flows.release.result import Accuracy, EvaluationFindings, ReleaseResult
from flows.rollout.page import page
from flows.rollout.result import result_of
from tests.unit.gates.rollouts import Rollout, Steady, plan_with
from tuneship.contract.evaluations import EvaluationSettings, GraderReport
from tuneship.contract.jobs import JobMetrics
from tuneship.gates.evaluation.evaluation_report import report_of
from tuneship.gates.evaluation.evaluation_tally import ScoredExample, rules_of, tally_of
from tuneship.gates.evaluation.verdict import judge
from tuneship.gates.metrics.metrics_reader import read_series
from tuneship.gates.record import Begun, Ended, Phase, RolloutRecord
from tuneship.gates.reports.split_history import Change
from tuneship.gates.reports.step_load import ArmLoad, loads_by_step

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
    """Metrics in buckets of one second, as the service reports them."""
    times = [(START + timedelta(seconds=i)).isoformat() for i in range(buckets)]
    same = {"timestamps": times, "complete": [True] * buckets}
    return {
        "deployment_id": "dep",
        "start_time": times[0],
        "end_time": (START + timedelta(seconds=buckets)).isoformat(),
        "interval": "1s",
        "metrics": {
            "throughput": {**same, "requests_per_second": [20.0] * buckets},
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
    """Read width and height from the header of a PNG file."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:24])


def measured(losses: list[float | None]) -> JobMetrics:
    """Metrics of three steps, whose validation loss equals their training loss."""
    return JobMetrics.model_construct(
        job_id="ft_1",
        steps=[1, 2, 3],
        training_loss=losses,
        validation_loss=losses,
        learning_rate=[0.1, 0.1, 0.1],
        epochs=[0.3, 0.6, 1.0],
        accuracy=[None, None, None],
        perplexity=[None, None, None],
        created_at=START,
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that a test draws, before they are saved as files."""
    figures: list[Figure] = []

    class Kept(Figure):
        def __init__(self, **fields: Any) -> None:
            super().__init__(**fields)
            figures.append(self)

    monkeypatch.setattr("flows.release.reports.plots.Figure", Kept)
    return figures


def test_a_refusal_names_the_gate_and_its_numbers_beside_the_limit() -> None:
    text = report(refused(), RELEASE, [])
    assert "gate `T4 champion`" in text
    assert "| T4 champion | reject | 0.5 | 0.3 | a\\|b |" in text


def test_after_a_bake_the_gates_are_those_that_last_compared_both_deployments() -> None:
    plan = plan_with(bake_weight=95)
    rollout = Rollout(plan, Steady()).begin()
    assert rollout.run().phase is Phase.SETTLE
    begun, *rest = rollout.record.facts
    assert isinstance(begun, Begun)
    begun = replace(begun, plan=plan.model_dump(mode="json"))
    ended = RolloutRecord((begun, *rest, Ended("promoted", "none")))
    compared = ended.last_comparison
    assert compared
    assert compared.phase is Phase.BAKE
    error = next(gate for gate in compared.gates if gate.name == "error")
    numbers = f"of {error.baseline_requests} ("
    assert numbers in page(ended)
    result = result_of(ended, [])
    assert numbers in " ".join(result.in_words)
    shifted = {"decisions": result.decisions, "in_words": result.in_words}
    text = report(refused().model_copy(update=shifted), RELEASE, [])
    (row,) = (line for line in text.splitlines() if line.startswith("| error |"))
    assert numbers in row


def test_the_summary_tells_accuracy_and_leaves_out_what_was_not_reached() -> None:
    rows = {row["what"]: row["value"] for row in summary(refused(), RELEASE)}
    assert rows["exact match after"] == "100 of 200 (50.0 %)"
    assert "candidate deployment" not in rows


def test_a_loss_grader_reads_as_nats_and_never_as_a_share() -> None:
    wanted = EvaluationSettings.model_validate(
        {"graders": [{"name": "c", "type": "choice"}, {"name": "l", "type": "loss"}]}
    )
    tally = tally_of(wanted, ())
    for ours, theirs in ((1.25, 1.0), (1.0, 1.5), (3.0, 1.0)):
        tally.add(ScoredExample({"c": 1.0, "l": ours}, {"c": 1.0, "l": theirs}))
    # A model that refused the prompt has no loss.
    tally.add(ScoredExample({"c": 0.0}, {"c": 1.0, "l": 9.0}))
    found = report_of(
        tally, judge(tally.counts, rules_of(wanted, has_baseline=True)), has_ended=True
    )
    graders = [GraderReport.model_validate(one) for one in found["graders"]]
    findings = EvaluationFindings(
        evaluation_id=None, sentence="s", graders=graders, slices=[], lost_lines=[]
    )
    result = refused().model_copy(update={"evaluation": findings})

    text = report(result, RELEASE, [])

    assert "| l (loss, lower is better) | 1.7500 nats | 1.1667 nats | 1 | 2 |" in text
    # The mean of +0.25, -0.5 and +2 with Student's t interval, of scipy.
    low, high = scipy.stats.t.interval(0.9, 2, 7 / 12, scipy.stats.sem([0.25, -0.5, 2.0]))
    assert f"+0.5833 \\[{low:+.4f}, {high:+.4f}\\] nats" in text
    assert "175.0 %" not in text
    numbers = dict(measures(result))
    assert numbers["evaluation/l/loss"] == 1.75
    assert "evaluation/l/score" not in numbers


def test_the_loss_picture_is_drawn_with_nulls_and_a_champion(tmp_path: Path) -> None:
    metrics = measured([2.0, None, 1.0]).model_copy(update={"validation_loss": [None, 1.5, 1.5]})
    plot_losses(metrics, [Limit("T4 champion", 1.2)], tmp_path / "loss.png")
    assert size(tmp_path / "loss.png") == (880, 440)


@pytest.mark.parametrize(
    ("losses", "scale"),
    [
        ([6.0, 1.0, 0.13], "log"),
        ([2.0, 1.5, 1.0], "linear"),
        ([6.0, 1.0, 0.0], "linear"),
        ([6.0, None, float("inf")], "linear"),
        ([None, None, None], "linear"),
    ],
)
def test_the_loss_axis_is_logarithmic_where_the_first_points_would_hide_the_last(
    losses: list[float | None], scale: str, tmp_path: Path, drawn: list[Figure]
) -> None:
    metrics = measured(losses)
    plot_losses(metrics, [], tmp_path / "loss.png")
    (axes,) = drawn[0].axes
    assert axes.get_yscale() == scale


def test_the_loss_picture_draws_the_limits_that_the_gates_decided_by(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    limits = [Limit("T4 champion", 0.151, 0.14)]
    plot_losses(measured([6.0, 1.0, 0.13]), limits, tmp_path / "loss.png")
    (axes,) = drawn[0].axes
    lines: dict[str, Any] = {str(line.get_label()): line.get_ydata() for line in axes.get_lines()}
    assert list(lines["limit of gate T4 champion 0.151, judged 0.140"]) == [limits[0].value] * 2
    low, high = axes.get_ylim()
    assert low < 0.13 < limits[0].value < high


def loaded(share: int, buckets: int = 10) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metrics of two steps, `share` and 100 %, ten seconds each, at 20 requests a second; p95 grows with the load."""
    candidate, baseline = answer(0, 2 * buckets), answer(0, 2 * buckets)
    for n in range(2 * buckets):
        mine = share if n < buckets else 100
        for arm, weight in ((candidate, mine), (baseline, 100 - mine)):
            arm["metrics"]["error_rate"]["request_count"][n] = 20 * weight // 100
            arm["metrics"]["throughput"]["requests_per_second"][n] = 20.0 * weight / 100
            arm["metrics"]["latency"]["p95"][n] = 100.0 + 2 * weight
    return baseline, candidate


def test_the_report_says_at_which_load_the_latencies_may_be_compared() -> None:
    history = [
        Change(at=START, weights={"dep_b": 50, "dep_c": 50}, why="first step"),
        Change(at=START + timedelta(seconds=10), weights={"dep_b": 0, "dep_c": 100}, why="promote"),
    ]
    series = read_series(*loaded(50), "1s")

    loads = loads_by_step(history, series, "dep_c")

    assert [one.share for one in loads] == [50, 100]
    assert (loads[0].candidate, loads[0].baseline) == (ArmLoad(10.0, 200.0), ArmLoad(10.0, 200.0))
    assert loads[1].candidate.per_second == 20.0
    released = refused().model_copy(update={"history": history})
    text = report(released, RELEASE, ["rollout.png"], loads)
    assert "at 50 % the candidate answered 10.0 requests/s with a p95 of 200 ms" in text
    assert "the baseline 10.0 with 200 ms" in text
    assert "At 100 % the candidate has all the load, 20.0 requests/s, and its p95 of 300 ms" in text
    assert "| 50 % | 10.0 | 200 ms | 10.0 | 200 ms |" in text


def test_the_time_at_100_percent_is_marked_in_the_latency_picture(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    history = [
        Change(at=START, weights={"dep_b": 50, "dep_c": 50}, why="first step"),
        Change(at=START + timedelta(seconds=3), weights={"dep_b": 0, "dep_c": 100}, why="promote"),
    ]
    series = read_series(answer(0), answer(0), "1s")
    plot_rollout(history, series, "dep_c", tmp_path / "rollout.png")
    latency = drawn[0].axes[2]
    assert [text.get_text() for text in latency.texts] == ["all load on the candidate"]


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


def test_a_rollout_without_times_is_drawn_from_its_metrics_alone(tmp_path: Path) -> None:
    timeless = [Change(at=None, weights={"dep_c": 10}, why="first step")]
    series = read_series(answer(0), answer(4), "1s")
    assert plot_rollout(timeless, series, "dep_c", tmp_path / "rollout.png")
    assert size(tmp_path / "rollout.png") == (880, 880)


def test_the_pictures_of_the_prefect_page_stand_in_its_text(tmp_path: Path) -> None:
    (tmp_path / "loss.png").write_bytes(b"\x89PNG")
    text = with_pictures("# A\n\n![Loss curves](loss.png)\n\n[a link](other.md)\n", tmp_path)
    assert text == "# A\n\n![Loss curves](data:image/png;base64,iVBORw==)\n\n[a link](other.md)\n"
