"""TensorBoard's own reader finds the curves, the report and the pictures, each once."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from tests.unit.tracking.runs import PIXELS, released, tracked, written_report
from tuneship.tracking.tensorboard_tracker import TensorboardTracker
from tuneship.tracking.tracked_run import TrackingTarget


@pytest.fixture
def tracker(tmp_path: Path) -> TensorboardTracker:
    place = str(tmp_path / "logs")
    return TensorboardTracker(TrackingTarget(tracker="tensorboard", place=place, group=""))


def read(file: str) -> EventAccumulator:
    events = EventAccumulator(str(Path(file).parent), size_guidance={"tensors": 0, "images": 0})
    events.Reload()
    return events


def curve(events: EventAccumulator, name: str) -> list[tuple[int, float, float]]:
    return [
        (one.step, make_ndarray(one.tensor_proto).item(), one.wall_time)
        for one in events.Tensors(name)
    ]


def test_the_curves_are_read_back_with_steps_and_times(tracker: TensorboardTracker) -> None:
    run = tracked()
    events = read(tracker.write(run))
    began, ended = run.started_at.timestamp(), run.ended_at.timestamp()
    assert curve(events, "training_loss") == [
        (1, 2.0, began + 10), (2, 1.5, began + 20), (3, 1.25, ended)
    ]  # fmt: skip
    assert [point[:2] for point in curve(events, "validation_loss")] == [(1, 2.25), (3, 1.5)]


def test_a_run_that_is_written_again_has_its_release_and_no_point_twice(
    tracker: TensorboardTracker, tmp_path: Path
) -> None:
    run = tracked()
    first = tracker.write(run)
    release = released("promoted", run.model, written_report(tmp_path / "report"))
    again = tracker.write(run.model_copy(update={"release": release}))
    content = Path(again).read_bytes()
    assert tracker.write(run) == again == first
    assert Path(again).read_bytes() == content, "an export must not take the release away"
    assert [file.name for file in Path(first).parent.iterdir()] == [Path(first).name]
    events = read(again)
    assert len(curve(events, "training_loss")) == 3
    assert curve(events, "gate/T4 champion/value")[0][1] == 0.5
    [report] = events.Tensors("release/report")
    assert len(events.Tensors("release/model_card")) == 1
    assert make_ndarray(report.tensor_proto).item() == b"# Release\n"
    [picture] = events.Images("release/loss")
    assert (picture.width, picture.height) == PIXELS
    [about] = events.Tensors("tuneship/run")
    assert b"| outcome | `promoted` |" in make_ndarray(about.tensor_proto).item()
    assert b"a" * 64 in make_ndarray(about.tensor_proto).item()
