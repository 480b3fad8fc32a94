"""Runs trackers in processes of their own, side by side, up to one time limit.

Their libraries start threads and helpers, retry for minutes and change the process that they run in. In a process
that is killed at the limit, none of that can hold up or fail a release.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO, Any

from pydantic import BaseModel, ValidationError

from tuneship.tracking.tracked_run import TrackedRun, TrackingReport, TrackingTarget


class TrackingOrder(BaseModel):
    """The order to one process: which runs to write, and where."""

    target: TrackingTarget
    runs: list[TrackedRun]


@dataclass(frozen=True)
class _Child:
    target: TrackingTarget
    process: "subprocess.Popen[bytes]"
    said: IO[bytes]


def write_outside(
    runs: Sequence[TrackedRun], targets: Sequence[TrackingTarget], timeout_s: float
) -> list[TrackingReport]:
    """Write the runs into every target, within one limit for all; what goes wrong is said in a target's report."""
    ends_at = time.monotonic() + timeout_s
    children: list[_Child] = []
    try:
        for target in targets:
            order = TrackingOrder(target=target, runs=list(runs))
            # Files instead of pipes: a pipe that nobody reads would block this process, and no limit would count.
            with TemporaryFile() as sent:
                sent.write(order.model_dump_json().encode())
                sent.seek(0)
                said = TemporaryFile()  # noqa: SIM115 - read when the process has ended
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "tuneship.tracking"],
                    stdin=sent,
                    stdout=said,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            # Started one by one: should the next fail, this one is ended, too.
            children.append(_Child(target, process, said))
        return [_report(child, ends_at, timeout_s) for child in children]
    finally:
        # Also those that a signal to this process has left running.
        for child in children:
            _end(child.process)
            child.said.close()


def _report(child: _Child, ends_at: float, timeout_s: float) -> TrackingReport:
    tracker = child.target.tracker
    try:
        child.process.wait(max(0.0, ends_at - time.monotonic()))
    except subprocess.TimeoutExpired:
        _end(child.process)
        return TrackingReport(tracker=tracker, problem=f"not done within {timeout_s:g} s")
    child.said.seek(0)
    try:
        return TrackingReport.model_validate_json(child.said.read())
    except ValidationError:
        code = child.process.returncode
        return TrackingReport(tracker=tracker, problem=f"its process ended with {code}")


def _end(process: "subprocess.Popen[Any]") -> None:
    """Kill a process that still runs, with the helpers that it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
