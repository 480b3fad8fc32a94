"""The process of one tracker: an order on standard input, a report on standard output. See `outside.py`."""

import os
import sys

from tuneship.settings import turn_off_telemetry
from tuneship.tracking.outside import TrackingOrder
from tuneship.tracking.tracked_run import TrackingReport
from tuneship.tracking.tracker import tracker_of

LONGEST_PROBLEM = 200


def main() -> None:
    """Write the runs of the order; every failure becomes the report's problem."""
    # What libraries print must not get into the report.
    report_to = os.dup(1)
    os.dup2(2, 1)
    turn_off_telemetry()
    order = TrackingOrder.model_validate_json(sys.stdin.buffer.read())
    report = TrackingReport(tracker=order.target.tracker)
    try:
        tracker = tracker_of(order.target)
        for run in order.runs:
            report.place = tracker.write(run)
    except Exception as error:  # noqa: BLE001 - a release goes on, whatever a tracker does
        line = " ".join(str(error).split())[:LONGEST_PROBLEM]
        report = TrackingReport(
            tracker=order.target.tracker, problem=f"{type(error).__name__}: {line}"
        )
    with os.fdopen(report_to, "w") as stream:
        stream.write(report.model_dump_json())


if __name__ == "__main__":
    main()
