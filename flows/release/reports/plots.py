"""Draws the pictures of a report: loss curves, traffic split, error rate and latency of both arms.

Numbers only, never text of a dataset. Baseline and candidate keep their colours in every picture. Import this module
where you draw: matplotlib starts slowly, and a run that is refused draws nothing. matplotlib ships no complete types;
the functions of this module are typed.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false

import math
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, StrMethodFormatter

from flows.forms.release_form import ReleaseEvaluation
from flows.release.loss_limits import Limit
from flows.release.result import EvaluationFindings
from tuneship.contract.evaluations import PairedReport
from tuneship.contract.reports.job_reports import JobMetrics
from tuneship.gates.metrics.series import ARMS, Arm, RolloutSeries
from tuneship.gates.reports.curves import arm_curve, evaluations, smoothed
from tuneship.gates.reports.split_history import Change

COLOURS = {"baseline": "#4c6a92", "candidate": "#e07b1a"}
LIMIT = "#b22222"
# Several limits differ by their dashes, which also a print in grey shows.
LIMIT_LINES = ("--", ":", "-.")
# Between the smallest and the largest loss; below, ticks of a logarithmic axis would be few.
LOGARITHMIC_FROM = 4.0
# More points would cover each other.
BINS = 40
SMOOTHING_STEPS = 10
UNITS = ((1.0, "seconds"), (60.0, "minutes"), (3600.0, "hours"), (86400.0, "days"))
STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.dpi": 110,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def plot_losses(metrics: JobMetrics, limits: Sequence[Limit], file: Path) -> None:
    """Draw training loss (raw and smoothed), validation loss at its evaluations, and the gates' limits."""
    steps, training = metrics.steps, metrics.training_loss
    evaluated = evaluations(metrics)
    losses = [loss for _, loss in evaluated]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        blue, orange = COLOURS["baseline"], COLOURS["candidate"]
        raw = [math.nan if loss is None else loss for loss in training]
        axes.plot(steps, raw, color=blue, alpha=0.2, linewidth=0.8)
        smooth = smoothed(training, SMOOTHING_STEPS)
        axes.plot(
            steps, smooth, color=blue, label=f"training (mean of about {SMOOTHING_STEPS} steps)"
        )
        best = f", best {min(losses):.3f}" if losses else ""
        points = [step for step, _ in evaluated]
        axes.plot(points, losses, "o-", color=orange, label=f"validation{best}")
        for limit, line in zip(limits, LIMIT_LINES, strict=False):
            label = f"limit of gate {limit.gate} {limit.value:.3f}"
            if limit.judged is not None:
                label += f", judged {limit.judged:.3f}"
            axes.axhline(limit.value, color=LIMIT, linestyle=line, linewidth=1.2, label=label)
        _label(axes, "Loss of the fine-tuning job", "step", "nats per token")
        drawn = [*raw, *losses, *(limit.value for limit in limits)]
        drawn = [value for value in drawn if math.isfinite(value)]
        # Where the values differ much, the first steps would flatten all later ones.
        if drawn and min(drawn) > 0 and max(drawn) >= LOGARITHMIC_FROM * min(drawn):
            axes.set_yscale("log")
            axes.set_ylim(min(drawn) / 1.1, max(drawn) * 1.1)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_ylabel("nats per token, logarithmic")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best")  # early in a training the curves lie at the top
        figure.savefig(file)


def plot_rollout(
    history: Sequence[Change], series: RolloutSeries | None, candidate_id: str, file: Path
) -> bool:
    """Draw the candidate's share, error rates and latency over one time axis; False where no time is known."""
    moments = [change.at for change in history if change.at]
    moments += [bucket.end for bucket in series.buckets] if series else []
    if not moments:
        return False
    clock = _Clock(min(moments), max(moments))
    end = clock.at(clock.end)
    shares = [(clock.at(c.at), c.weights.get(candidate_id, 0)) for c in history if c.at]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 8), layout="constrained")
        split, errors, latency = figure.subplots(3, 1, sharex=True)
        _draw_split(split, shares, end)
        if series and series.buckets:
            for arm in ARMS:
                _draw_arm(errors, latency, series, clock, arm)
        _label(errors, "Failed requests", "", "% of requests")
        _label(latency, "Latency", clock.unit, "ms (means of percentiles)")
        top = max(5.0, errors.get_ylim()[1])
        errors.set_ylim(-0.03 * top, top)  # a line at zero stays visible
        latency.set_ylim(bottom=0, top=1.15 * latency.get_ylim()[1])  # room for a note
        for axes in (errors, latency):
            if axes.has_data():
                axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=4, borderpad=0)
                _mark_steps(axes, shares, end)
        figure.savefig(file)
    return True


def plot_evaluation(found: EvaluationFindings, settings: ReleaseEvaluation, file: Path) -> bool:
    """Draw the differences with their intervals, the whole first and then the slices, worst first.

    Zero and both margins are lines; slices that were not tested are grey. Losses, which have no points, are left out.
    False where nothing was compared.
    """
    whole = [one for one in found.graders if one.difference is not None and one.measure == "score"]
    if not whole:
        return False
    slices = sorted(found.slices, key=lambda one: (one.difference is None, one.difference or 0.0))
    rows: list[tuple[str, PairedReport, str]] = [
        (one.name, one, COLOURS["candidate"]) for one in whole
    ]
    for one in slices:
        label = f"{one.field} {one.value} (n {one.examples})"
        rows.append((label, one, "#999999" if one.difference is None else COLOURS["baseline"]))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.8 + 0.35 * len(rows)), layout="constrained")
        axes = figure.subplots()
        labels: list[str] = []
        for place, (label, one, colour) in enumerate(rows):
            labels.append(label)
            if one.difference is None or one.low is None or one.high is None:
                axes.text(0.0, place, " not tested", color=colour, va="center", fontsize=8)
                continue
            middle, low, high = 100 * one.difference, 100 * one.low, 100 * one.high
            axes.plot([low, high], [place, place], color=colour, linewidth=2)
            axes.plot([middle], [place], "o", color=colour)
            wins = f" {one.wins} : {one.losses}"
            axes.text(high, place, wins, color=colour, va="center", fontsize=8)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.axvline(-100 * settings.margin, color=LIMIT, linestyle="--", label="margin")
        if slices:
            limit = -100 * settings.slice_margin
            axes.axvline(limit, color=LIMIT, linestyle=":", label="margin of slices")
        axes.set_yticks(range(len(rows)), labels)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.margins(x=0.12)  # room for the numbers
        _label(
            axes, "Candidate minus baseline, wins : losses", "points of score, 90 % interval", ""
        )
        figure.legend(loc="outside lower center", ncols=2)
        figure.savefig(file)
    return True


class _Clock:
    """Converts times to numbers since the start, in the unit that suits the whole span."""

    def __init__(self, start: datetime, end: datetime) -> None:
        self.start, self.end = start, end
        span = (end - start).total_seconds()
        # With fewer than three units the axis would have hardly a tick.
        fitting = (unit for unit in reversed(UNITS) if span >= 3 * unit[0])
        self._seconds, self.unit = next(fitting, UNITS[0])
        self.bin_seconds = max(1, math.ceil(span / BINS))

    def at(self, moment: datetime) -> float:
        return (moment - self.start).total_seconds() / self._seconds


def _draw_split(axes: Axes, shares: Sequence[tuple[float, int]], end: float) -> None:
    """Draw the candidate's share, each from its change to the next one or to the end."""
    if shares:
        times = [time for time, _ in shares] + [end]
        heights = [share for _, share in shares] + [shares[-1][1]]
        axes.fill_between(times, heights, step="post", color=COLOURS["candidate"], alpha=0.85)
        axes.fill_between(times, heights, 100, step="post", color=COLOURS["baseline"], alpha=0.85)
    for time, share in shares:
        axes.annotate(f"{share} %", (time, 102), annotation_clip=False, fontsize=9)
        axes.axvline(time, color="white", linewidth=0.8)
    _label(axes, "Traffic: candidate below (orange), baseline above (blue)\n", "", "% of traffic")
    axes.set_ylim(0, 100)


def _mark_steps(axes: Axes, shares: Sequence[tuple[float, int]], end: float) -> None:
    """Draw a line where the split changes, and grey where the candidate has all load and no baseline to compare."""
    if not shares:  # no change has a time
        return
    later = [*(time for time, _ in shares[1:]), end]
    for (start, share), stop in zip(shares, later, strict=True):
        axes.axvline(start, color="grey", linewidth=0.8, alpha=0.5)
        if share == 100 and stop > start:
            axes.axvspan(start, stop, color="grey", alpha=0.12, linewidth=0)
            middle, place = (start + stop) / 2, axes.get_xaxis_transform()
            note = "all load on the candidate"
            axes.text(middle, 0.97, note, transform=place, ha="center", va="top", fontsize=9)


def _draw_arm(errors: Axes, latency: Axes, series: RolloutSeries, clock: _Clock, arm: Arm) -> None:
    """Draw one deployment's curves, with about 40 points."""
    points = arm_curve(series, arm, clock.bin_seconds)
    times = [clock.at(point.at) for point in points]
    shares = [point.error_percent for point in points]
    errors.plot(times, shares, "o-", markersize=3, color=COLOURS[arm], label=arm)
    for name, line, values in (
        ("p50", "-", [point.p50_ms for point in points]),
        ("p95", ":", [point.p95_ms for point in points]),
    ):
        latency.plot(times, values, line, color=COLOURS[arm], label=f"{arm} {name}")


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
