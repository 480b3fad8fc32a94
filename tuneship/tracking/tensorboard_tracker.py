"""TensorBoard: one event file for each training, in a folder of its own below the log folder.

The file is written whole beside its place and renamed, so a run that is written again with a release replaces its file.
"""

import struct
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.scalar.summary_v2 import scalar_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from tuneship.host.durable import flush, flush_open
from tuneship.tracking.tracked_run import TrackedRun, TrackingTarget

# TensorBoard takes the files of a folder that have this in their name, sorted by it.
EVENTS = "events.out.tfevents"
# The header of a PNG file: a signature, then width and height of the picture.
PNG_SIZE = slice(16, 24)


class TensorboardTracker:
    """Writes event files below one folder."""

    def __init__(self, target: TrackingTarget) -> None:
        """Write below `target.place`, which the first run creates."""
        self._folder = Path(target.place)

    def write(self, run: TrackedRun) -> str:
        """Write the event file of the run and return its path."""
        folder = self._folder / run.job_id
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{EVENTS}.{int(run.started_at.timestamp())}.{run.job_id}"
        # A job that has ended does not change: without a release there is nothing to add to its file.
        if run.release is None and file.exists():
            return str(file)
        # TensorBoard reads every file with that name in it, half ones too.
        staged = folder / f".{run.job_id}.tmp"
        with staged.open("wb") as stream:
            writer = RecordWriter(stream)
            start = Event(wall_time=run.started_at.timestamp(), file_version="brain.Event:2")
            for event in (start, *_events(run)):
                writer.write(event.SerializeToString())
            flush_open(stream)
        staged.replace(file)
        flush(folder)
        return str(file)


def _events(run: TrackedRun) -> Iterator[Event]:
    settings: Mapping[str, bool | int | float | str] = run.parameters
    yield _event(
        hparams_pb(settings, trial_id=run.job_id, start_time_secs=run.started_at.timestamp()),
        run.started_at,
    )

    rows: dict[str, object] = {"job": run.job_id, "status": run.status, "model": run.model or "-"}
    rows |= run.parameters
    for one in run.datasets:
        rows[f"{one.context} {one.id}"] = f"{one.examples} examples, {one.digest}"
    if run.release is not None:
        rows |= {"release": run.release.run_key, "outcome": run.release.outcome}
        rows["reason"] = run.release.reason
        rows |= {f"gate {name}": state for name, state in run.release.gates.items()}
    lines = [f"| {name} | `{value}` |" for name, value in rows.items()]
    table = "\n".join(["| what | value |", "|---|---|", *lines])
    yield _event(text_pb("tuneship/run", table), run.started_at)

    for name, step, value, at in run.points():
        yield _event(scalar_pb(name, value), at, step)
    if run.release is None:
        return
    for name, value in run.release.measures.items():
        yield _event(scalar_pb(name, value), run.ended_at)
    for file in run.release.files:
        if file.suffix == ".md":
            yield _event(text_pb(f"release/{file.stem}", file.read_text()), run.ended_at)
        elif file.suffix == ".png":
            content = file.read_bytes()
            width, height = struct.unpack(">II", content[PNG_SIZE])
            image = Summary.Image(
                width=width, height=height, colorspace=3, encoded_image_string=content
            )
            shown = Summary(value=[Summary.Value(tag=f"release/{file.stem}", image=image)])
            yield _event(shown, run.ended_at)


def _event(summary: Summary, at: datetime, step: int = 0) -> Event:
    return Event(wall_time=at.timestamp(), step=step, summary=summary)


def tracker(target: TrackingTarget) -> TensorboardTracker:
    """The tracker of a folder."""
    return TensorboardTracker(target)
