"""The protocol of a tracker, and the three there are. Their libraries are loaded only where one is used."""

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from tuneship.tracking.tracked_run import TrackedRun, TrackerName, TrackingTarget

MODULES: Mapping[TrackerName, str] = {
    "mlflow": "tuneship.tracking.mlflow_tracker",
    "tensorboard": "tuneship.tracking.tensorboard_tracker",
    "wandb": "tuneship.tracking.wandb_tracker",
}


class Tracker(Protocol):
    """Writes runs into one place. Writing a run that is there already completes it and doubles nothing."""

    def write(self, run: TrackedRun) -> str:
        """Write the run and return where people find it: a URL or a path. Raises whatever its library raises."""
        ...


class TrackerNotInstalled(Exception):
    """The library of a tracker is missing."""


def tracker_of(target: TrackingTarget) -> Tracker:
    """The tracker that writes into this place. Raises `TrackerNotInstalled`, which says what to install."""
    try:
        module = import_module(MODULES[target.tracker])
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "tuneship":
            raise  # a fault of ours, and no installation would mend it
        need = f"this needs `pip install 'tuneship[{target.tracker}]'` (missing: {error.name})"
        raise TrackerNotInstalled(need) from None
    return module.tracker(target)
