"""A training and its release, as trackers are given them."""

import struct
import zlib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from tuneship.tracking.tracked_run import TrackedDataset, TrackedRelease, TrackedRun

START = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
PIXELS = (3, 2)


def tracked(job: str = "ft_first", **changes: Any) -> TrackedRun:
    fields: dict[str, Any] = {
        "job_id": job,
        "model_name": "chapters",
        "status": "completed",
        "model": f"ft:tuneship-tiny:chapters:{job.removeprefix('ft_')}",
        "parameters": {"base_model": "tuneship-tiny", "hyperparameters.learning_rate": 0.01},
        "curves": {
            "training_loss": [(1, 2.0), (2, 1.5), (3, 1.25)],
            "validation_loss": [(1, 2.25), (3, 1.5)],
        },
        "datasets": [
            TrackedDataset(id="ds_a", digest="a" * 64, examples=80, context="training"),
            TrackedDataset(id="ds_v", digest="b" * 64, examples=20, context="validation"),
        ],
        "started_at": START,
        "ended_at": START + timedelta(seconds=30),
    }
    return TrackedRun.model_validate(fields | changes)


def released(outcome: str, serving: str | None, report: Path | None = None) -> TrackedRelease:
    return TrackedRelease(
        run_key=f"run-{outcome}",
        outcome=outcome,
        reason="none",
        gates={"T4 champion": "pass"},
        measures={"gate/T4 champion/value": 0.5},
        serving=serving,
        report=report,
    )


def written_report(folder: Path) -> Path:
    folder.mkdir()
    (folder / "report.md").write_text("# Release\n")
    (folder / "model_card.md").write_text("# Card\n")
    (folder / "model_card.json").write_text("{}")
    (folder / "loss.png").write_bytes(picture(*PIXELS))
    (folder / "notes.txt").write_text("no part of a report")
    return folder


def picture(width: int, height: int) -> bytes:
    """A black PNG."""
    rows = b"\0" * (height * (1 + 3 * width))
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)
