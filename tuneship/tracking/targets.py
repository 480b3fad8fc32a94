"""From settings to targets: which trackers are used, and where each writes."""

from collections.abc import Mapping
from urllib.parse import urlsplit

from tuneship.settings import TrackingSettings
from tuneship.tracking.tracked_run import TrackerName, TrackingTarget

# The setting that names each tracker's place.
PLACES: Mapping[TrackerName, str] = {
    "mlflow": "mlflow_url",
    "tensorboard": "tensorboard_dir",
    "wandb": "wandb_dir",
}


def server_url(url: str) -> str:
    """Check the address of a tracking server. Raises ValueError, which does not repeat it."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("must begin with http:// or https:// and name a host")
    # Results and logs name the address, so it must hold nothing that opens the server.
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            "must hold no credentials: MLFLOW_TRACKING_TOKEN or _USERNAME and _PASSWORD"
        )
    return url


def targets_of(settings: TrackingSettings) -> list[TrackingTarget]:
    """The targets that have a place. Raises ValueError for an address that is none."""
    targets: list[TrackingTarget] = []
    if settings.mlflow_url:
        place = server_url(settings.mlflow_url)
        group = settings.mlflow_experiment
        targets.append(TrackingTarget(tracker="mlflow", place=place, group=group))
    if settings.tensorboard_dir:
        place = str(settings.tensorboard_dir.expanduser())
        targets.append(TrackingTarget(tracker="tensorboard", place=place, group=""))
    if settings.wandb_dir:
        place = str(settings.wandb_dir.expanduser())
        group = settings.wandb_project
        targets.append(TrackingTarget(tracker="wandb", place=place, group=group))
    return targets
