"""The kinds of traffic, and how a rollout must end on each of them.

What happens in a certain minute happens in one that is drawn: a fixed one could be just where the gates look.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from tests.unit.gates.drawn import traffic
from tests.unit.gates.drawn.worlds import PER_MINUTE, Behaviour, Minute, MinuteOf, Random


@dataclass(frozen=True)
class Kind:
    """One kind of traffic, and how the rollout must end on it."""

    name: str
    make: Callable[[Random], MinuteOf]
    must: str = "be promoted"
    # Largest share of runs that may end otherwise. With None the share is only reported.
    most: float | None = 0.05
    plan: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: int = 60
    # Latest look at which the median run must have stopped.
    by: int | None = None
    # Number of looks until a shift takes effect, although it was read back before.
    lag: int = 0
    note: str = ""
    # Whether the endpoint had traffic in the hour before.
    has_past: bool = True
    # Whether its rollouts take much longer than most.
    is_long: bool = False
    row: int = 0

    @property
    def must_be_promoted(self) -> bool:
        return self.must == "be promoted"

    @property
    def runs(self) -> int:
        """The number of runs in `make test-all`, where all kinds together take some four minutes of processor time."""
        if self.is_long:
            return 5
        return 10 if self.must_be_promoted else 20


DEMO = {
    "steps": [10, 25, 50, 100],
    "look_every_seconds": 1.0,
    "bake_looks": 15,
    "latency_gates": {"per_output_token": True},
}

EXAMPLE = yaml.safe_load(
    (Path(__file__).parents[4] / "examples/release.yaml").read_text(encoding="utf-8")
)["canary"]
STOPPED = "be stopped"
ONE_LENGTH: dict[str, Any] = {"spread": math.log(1.12) / 1.645}
PER_TOKEN = {"latency_gates": {"per_output_token": True}}

_ALL = (
    # What must be promoted.
    Kind("equal", traffic.steady()),
    Kind(
        "load: time grows with a deployment's share", traffic.both(traffic.loaded, traffic.constant)
    ),
    Kind("heavy tail in both", traffic.both(lambda *_: Behaviour(tail=0.08), traffic.constant)),
    Kind("200 sticky sites of different health", traffic.sticky(200)),
    Kind(
        "morning ramp: traffic x4, time x1.7 in two hours",
        traffic.both(
            lambda number, *_: Behaviour(time=1 + 0.7 * traffic.ramp(number)),
            lambda number: PER_MINUTE * (1 + 3 * traffic.ramp(number)),
        ),
    ),
    Kind("shared incidents of 2 min, once an hour", traffic.incidents(60, 2)),
    Kind(
        "errors in runs of 15", traffic.both(lambda *_: Behaviour(repeats=15.0), traffic.constant)
    ),
    Kind("12 sticky sites of different health", traffic.sticky(12)),
    Kind(
        "twice as many long prompts at the candidate",
        traffic.both(traffic.prompts, traffic.constant),
        most=0.10,
    ),
    Kind(
        "cold start: x2.5 and 3 % errors for 3 min",
        traffic.both(traffic.cold, traffic.constant),
        most=0.10,
    ),
    Kind("two machines: the candidate's is 10 % slower", traffic.steady(time=1.1)),
    Kind("retries by a gateway", traffic.both(traffic.retries, traffic.constant)),
    Kind(
        "streams and whole answers mixed",
        traffic.both(traffic.streams, traffic.constant),
        most=0.10,
    ),
    Kind("bursts at the hour: traffic x5, time x1.5", traffic.hourly),
    Kind("a third deployment takes 30 %", lambda _: lambda *_: Minute(PER_MINUTE * 0.7)),
    Kind("every fourth look reads an old answer", traffic.stale),
    Kind("the service's clock stands for two minutes in 20", traffic.clocks),
    Kind(
        "5 % of the callers always disconnect early",
        traffic.both(lambda *_: Behaviour(cancelled=0.05), traffic.constant),
    ),
    Kind(
        "1 % errors in both, correlated within a minute (0.05)",
        traffic.both(lambda *_: Behaviour(errors=0.01, clustered=0.05), traffic.constant),
    ),
    Kind("a shift takes effect two minutes after it was read back", traffic.steady(), lag=2),
    Kind(
        "10 requests a minute, `steps: auto`",
        traffic.both(lambda *_: Behaviour(), lambda _: 10.0),
        most=None,
        plan={"steps": [50, 75, 100]},
    ),
    Kind("requests split one by one, none lost", traffic.steady(), plan={"split_check": True}),
    Kind(
        "answers of one length: 4 % slower",
        traffic.pair(Behaviour(**ONE_LENGTH), Behaviour(time=1.04, **ONE_LENGTH)),
    ),
    Kind(
        "answers of one length: equal",
        traffic.pair(Behaviour(**ONE_LENGTH), Behaviour(**ONE_LENGTH)),
    ),
    Kind(
        "answers of one length, other edges: 4 % slower",
        traffic.pair(Behaviour(time=1.35, **ONE_LENGTH), Behaviour(time=1.404, **ONE_LENGTH)),
    ),
    Kind("nothing below 520 ms, p95 unchanged", traffic.steady(least_ms=520.0)),
    Kind("one replica each, load x4 during the rollout", traffic.growing_load),
    Kind("20 % slower, `per_output_token`", traffic.steady(time=1.2), plan=PER_TOKEN),
    Kind(
        "moved conversations meet a cold prefix cache",
        traffic.conversations,
        most=0.10,
        is_long=True,
    ),
    Kind(
        "x1.4 at first, warms in an hour",
        traffic.by_minute(lambda n: Behaviour(time=1 + 0.4 * max(0.0, 1 - n / 60))),
        most=0.10,
    ),
    Kind("a keyed night job, half of the requests, x3 time", traffic.night_job()),
    Kind("a keyed caller of 9 % is always refused", traffic.large_caller(0.09, refused=300.0)),
    Kind("a keyed caller of 9 % always disconnects", traffic.large_caller(0.09, cancelled=200.0)),
    Kind(
        "a keyed caller of 20 % turns to long prompts",
        traffic.large_caller(0.2, late=True, time=2.5),
    ),
    Kind(
        "a driver beside 20 keyed callers",
        traffic.sticky(20, alone=0.67),
        plan={"split_check": True},
    ),
    Kind("the baseline begins to fail 8 %", traffic.baseline_fails),
    Kind(
        "the baseline failed 8 % before: a fix",
        traffic.pair(Behaviour(errors=0.08), Behaviour()),
    ),
    Kind("shared outage of 6 min, then a herd of retries", traffic.outage),
    Kind("0.8 v 0.2 % errors, shared incidents of 6 min", traffic.incidents(40, 6, 0.002, 0.008)),
    Kind("equal, shared incidents of 6 min", traffic.incidents(40, 6)),
    Kind("0.8 v 0.2 % errors", traffic.pair(Behaviour(errors=0.002), Behaviour(errors=0.008))),
    Kind("one bad minute (20 % errors) at 3,000 a minute", traffic.bad_minute(3000.0)),
    Kind("one bad minute (20 % errors) at 300 a minute", traffic.bad_minute(300.0)),
    Kind(
        "begun at 3 h: 4 a minute, 300 at 7 h; steps 50, 75",
        traffic.both(lambda *_: Behaviour(), traffic.night),
        most=0.10,
        plan={"steps": [50, 75, 100]},
        is_long=True,
    ),
    Kind(
        "begun at 3 h, default steps",
        traffic.both(lambda *_: Behaviour(), traffic.night),
        most=0.10,
        is_long=True,
    ),
    Kind("both fail 3 %", traffic.both(lambda *_: Behaviour(errors=0.03), traffic.constant)),
    Kind("both 4 % blank", traffic.both(lambda *_: Behaviour(blank=0.04), traffic.constant)),
    Kind("a new replica after each increase", traffic.new_replicas(300.0)),
    Kind("a new replica after each increase, 3,000 a minute", traffic.new_replicas(3000.0)),
    Kind("a tenth of the buckets lost in both", traffic.lost_buckets),
    Kind(
        "two time zones: traffic and time go up and down",
        traffic.both(
            lambda number, *_: Behaviour(time=1.25 + 0.25 * math.sin(number / 25)),
            lambda number: PER_MINUTE * (1.5 + 0.8 * math.sin(number / 25)),
        ),
    ),
    Kind("the baseline becomes slow", traffic.baseline_slows),
    Kind("1.3 x as long answers", traffic.steady(words=1.3)),
    Kind(
        "lengths drift in both",
        traffic.both(
            lambda number, *_: Behaviour(words=1 + 0.5 * traffic.ramp(number)), traffic.constant
        ),
    ),
    Kind(
        "traffic fades to a third in an hour",
        traffic.both(
            lambda *_: Behaviour(),
            lambda number: PER_MINUTE * (1 - 2 / 3 * min(max(number, 0) / 60, 1)),
        ),
    ),
    Kind("the candidate restarts: 40 % errors, x2 for a minute", traffic.restart),
    Kind("a new endpoint", traffic.steady(), has_past=False),
    Kind(
        "a new endpoint, heavy tail",
        traffic.both(lambda *_: Behaviour(tail=0.08), traffic.constant),
        has_past=False,
    ),
    Kind("a job without a key, half of the requests, x3 time", traffic.night_job(keyed=False)),
    # What must be stopped.
    Kind("5 % errors", traffic.steady(errors=0.05), STOPPED, 0.02, by=12),
    Kind("1.5 x slower", traffic.steady(time=1.5), STOPPED, 0.02, by=20),
    Kind(
        "4 % of the answers 20 x slower",
        traffic.steady(slow_share=0.04, slow_factor=20.0),
        STOPPED,
        0.02,
    ),
    Kind(
        "drift: +0.15 points of errors a minute",
        traffic.by_minute(lambda n: Behaviour(errors=0.005 + 0.0015 * n)),
        STOPPED,
        0.02,
    ),
    Kind("crash minutes (40 % errors), 1 in 15 at random", traffic.crashes, STOPPED, 0.10),
    Kind("a slice of 5 % in which half fails", traffic.steady(errors=0.03), STOPPED, 0.02),
    Kind(
        "a slice of 2 % in which half fails",
        traffic.steady(errors=0.015),
        STOPPED,
        None,
        note="no bound: hardly above the margin",
    ),
    Kind(
        "a slice of 1 % in which half fails",
        traffic.steady(errors=0.01),
        STOPPED,
        None,
        note="not promised: on the margin",
    ),
    Kind("2 points more errors", traffic.steady(errors=0.025), STOPPED, 0.02),
    Kind(
        "1 point more of four faults each",
        traffic.pair(
            Behaviour(),
            Behaviour(errors=0.015, blank=0.012, cancelled=0.015, refused=0.013),
        ),
        STOPPED,
        0.10,
    ),
    Kind("30 % hang, callers wait 10 s", traffic.steady(hang=0.3), STOPPED, 0.02, by=5),
    Kind("smaller context: the longest 10 % refused", traffic.steady(refused=0.1), STOPPED, 0.02),
    Kind("answers of a fifth of the words", traffic.steady(words=0.2), STOPPED, 0.02, by=5),
    Kind("30 % are a full stop", traffic.steady(full_stops=0.3), STOPPED, 0.02, by=5),
    Kind("all are a full stop", traffic.steady(full_stops=1.0), STOPPED, 0.02, by=5),
    Kind("3 % loop to the token limit", traffic.steady(loops=0.03), STOPPED, 0.10),
    Kind("6 % loop, `per_output_token`", traffic.steady(loops=0.06), STOPPED, 0.02, plan=PER_TOKEN),
    Kind(
        "wrong answers (nothing counts them)",
        traffic.steady(),
        STOPPED,
        None,
        note="not promised: needs evaluations",
    ),
    Kind(
        "fine for 90 min, then 10 % errors, x2",
        traffic.late(90, errors=0.1, time=2.0),
        STOPPED,
        None,
        note="not promised: after the bake",
    ),
    Kind("one replica of three stuck", traffic.steady(hang=1 / 3, patience_s=30.0), STOPPED, 0.02),
    Kind(
        "flapping: 8 % errors every second minute v 0.3 %", traffic.flapping, STOPPED, 0.02, by=15
    ),
    Kind(
        "two minutes at x3 before the start, then 1.5 x slower",
        traffic.stalled,
        STOPPED,
        0.02,
        by=20,
    ),
    Kind(
        "5 % errors, every fourth look reads an old answer",
        lambda rng: traffic.stale(rng, errors=0.05),
        STOPPED,
        0.02,
    ),
    Kind(
        "20 % hang, time-out 120 s",
        traffic.steady(hang=0.2, patience_s=120.0, times_out=True),
        STOPPED,
        0.02,
    ),
    Kind(
        "20 % of the requests vanish",
        traffic.steady(vanish=0.2),
        STOPPED,
        0.02,
        plan={"split_check": True},
        is_long=True,
    ),
    Kind(
        "the candidate's counts of each tenth minute are lost",
        traffic.loses_counts,
        STOPPED,
        0.02,
        is_long=True,
    ),
    Kind(
        "20 % hang, time-out 120 s, the demo's plan",
        traffic.demo_hang,
        STOPPED,
        0.02,
        plan=DEMO,
        seconds=1,
        is_long=True,
    ),
    Kind(
        "answers of one length: 1.4 x slower",
        traffic.pair(Behaviour(**ONE_LENGTH), Behaviour(time=1.4, **ONE_LENGTH)),
        STOPPED,
        0.02,
        by=15,
    ),
    Kind("both x6 in the morning, candidate x1.6", traffic.slow_morning, STOPPED, 0.02, by=15),
    Kind(
        "candidate x1.5, a keyed job hides it at the baseline",
        traffic.night_job(time=1.5),
        STOPPED,
        0.02,
    ),
    Kind(
        "the median doubles, p95 stays",
        traffic.steady(time=2.0, spread=math.log(900 / 800) / 1.645),
        STOPPED,
        0.02,
    ),
    Kind("1.5 x slower from minute 30 on", traffic.late(30, time=1.5), STOPPED, 0.02, by=50),
    Kind("3 % errors from minute 30 on", traffic.late(30, errors=0.03), STOPPED, 0.02, by=50),
    Kind("8 % errors every second minute", traffic.flapping_usual, STOPPED, 0.02, by=15),
    # At the end, since each kind's seeds come from its place.
    Kind(
        "examples/release.yaml beside users, 2 s of each minute stalled",
        traffic.stalls,
        plan=EXAMPLE,
        seconds=1,
        is_long=True,
    ),
    Kind("no traffic for three hours", traffic.pause, is_long=True),
    Kind(
        "a cache answers half in 20 ms: 50 v 46 % hits",
        traffic.pair(
            Behaviour(slow_share=0.5, slow_factor=0.05),
            Behaviour(slow_share=0.46, slow_factor=0.05),
        ),
    ),
    Kind(
        "a cache answers 52 % in 20 ms, answers alike",
        traffic.both(
            lambda *_: Behaviour(slow_share=0.52, slow_factor=0.05, spread=0.2), traffic.constant
        ),
    ),
    Kind(
        "a cache of 50 % is broken",
        traffic.pair(Behaviour(slow_share=0.5, slow_factor=0.05), Behaviour()),
        STOPPED,
        0.02,
    ),
)
# All kinds by name. They are numbered, so that every kind draws from seeds of its own.
KINDS = {kind.name: replace(kind, row=row) for row, kind in enumerate(_ALL)}
