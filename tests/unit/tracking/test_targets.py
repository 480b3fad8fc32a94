"""Settings name the trackers; a bad address is refused, and the credentials in it are not repeated."""

import sys
from pathlib import Path

import pytest

from tests.unit.tracking.runs import tracked
from tuneship.settings import TrackingSettings
from tuneship.tracking.targets import targets_of
from tuneship.tracking.tracked_run import TrackingTarget
from tuneship.tracking.tracker import TrackerNotInstalled, tracker_of


def test_without_a_place_nothing_is_tracked() -> None:
    assert targets_of(TrackingSettings()) == []


def test_each_place_is_a_target() -> None:
    settings = TrackingSettings(
        mlflow_url="http://host:5000",
        tensorboard_dir=Path("/logs"),
        wandb_dir=Path("/runs"),
        wandb_project="chapters",
    )
    found = [(one.tracker, one.place, one.group) for one in targets_of(settings)]
    assert found == [
        ("mlflow", "http://host:5000", "tuneship"),
        ("tensorboard", "/logs", ""),
        ("wandb", "/runs", "chapters"),
    ]


@pytest.mark.parametrize(
    "url",
    ["host:5000", "ftp://host", "http://", "https://user:secret@host", "http://host/?k=secret"],
)
def test_a_bad_address_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ValueError, match=r"^must ") as refused:
        targets_of(TrackingSettings(mlflow_url=url))
    assert "secret" not in str(refused.value)


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.delitem(sys.modules, "tuneship.tracking.mlflow_tracker", raising=False)
    target = TrackingTarget(tracker="mlflow", place="http://host", group="g")
    with pytest.raises(TrackerNotInstalled, match=r"pip install 'tuneship\[mlflow\]'"):
        tracker_of(target)


def test_points_are_spread_over_the_time_of_the_training() -> None:
    run = tracked(curves={"training_loss": [(0, 2.0), (4, 1.0), (8, 0.5)]})
    times = [(at - run.started_at).total_seconds() for _, _, _, at in run.points()]
    assert times == [0.0, 15.0, 30.0]
