"""Metrics as pandas frames. Imported only when a frame is asked for: pandas takes a second to load.

It ships no complete types, so what leaves this module is typed by hand.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import pandas as pd

JOB_COLUMNS = (
    "training_loss",
    "validation_loss",
    "learning_rate",
    "epochs",
    "accuracy",
    "perplexity",
)


def job_frame(steps: Sequence[int], columns: Mapping[str, Sequence[float | None]]) -> pd.DataFrame:
    """A frame with one row for each step and one float column for each of `columns`; null is NaN, infinities are
    kept.
    """
    index = pd.Index(steps, name="step", dtype="int64")
    return pd.DataFrame(columns, index=index, dtype="float64")


def deployment_frame(series: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """A frame with one row for each bucket, by its start; a float column `<series>_<field>` for each array, and
    `complete`.

    Each series has its own times, so a bucket that one of them leaves out is NaN there.
    """
    parts: list[Any] = []
    flags: list[Any] = []
    for name, fields in series.items():
        times: list[datetime | None] = fields["timestamps"] or []
        index = pd.DatetimeIndex(times, name="time", tz="UTC")
        known = index.notna() & ~index.duplicated(keep="last")
        columns = {
            f"{name}_{field}": fields[field] or [None] * len(times)
            for field in fields
            if field not in ("timestamps", "complete", "histogram", "cells", "cells_per_token")
        }
        parts.append(pd.DataFrame(columns, index=index, dtype="float64")[known])
        complete = fields["complete"] or [True] * len(times)
        flags.append(pd.Series(complete, index=index, dtype="boolean")[known])
    if not parts:
        return pd.DataFrame(index=pd.DatetimeIndex([], name="time", tz="UTC"))
    frame = pd.concat(parts, axis=1, sort=False).sort_index()
    frame["complete"] = pd.concat(flags, axis=1, sort=False).all(axis=1)
    return frame


def scores_frame(results: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A frame with one row for each example, indexed by line: outcome, scores by model and grader, and slices."""
    rows = [
        {
            "line": one["line"],
            "outcome": one["outcome"],
            **{f"candidate_{name}": score for name, score in (one["candidate"] or {}).items()},
            **{f"baseline_{name}": score for name, score in (one["baseline"] or {}).items()},
            **{f"slice_{name}": value for name, value in one["slices"].items()},
        }
        for one in results
    ]
    return pd.DataFrame(rows, columns=None if rows else ["line", "outcome"]).set_index("line")
