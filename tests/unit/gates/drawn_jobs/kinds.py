"""The rows of the table: jobs that must pass a gate or be refused by it, and the bounds on wrong ends."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tests.unit.gates.drawn_jobs import before
from tests.unit.gates.drawn_jobs.worlds import SHORT_ANSWERS, Curve, Rows, answers
from tuneship.gates.smoke_test import judge_smoke
from tuneship.gates.training.divergence import (
    LIVE_DIVERGING_POLLS,
    DivergenceWatch,
    watch_losses,
)
from tuneship.gates.training.training_gates import (
    FinishedJob,
    TrainingRules,
    ValidationMeasure,
    judge_training,
)

JOB = FinishedJob("completed", "ft:base:m:2", "base", None, "ds_v", "aa", 500)
CHAMPION = ValidationMeasure("base", "ds_v", "aa", 1.0, "ft:base:champion:1")
Judge = Callable[[int], str]


@dataclass(frozen=True)
class JobKind:
    """A row of the table. A judge says "pass", "hold" or "reject" of the job with a seed."""

    name: str
    must: Literal["pass", "be refused"]
    before: Judge
    after: Judge
    # The largest share of wrong ends: refused by a gate that must pass, or passed; and of holds.
    most: float
    most_holds: float = 0.0
    note: str = ""


def shares(judge: Judge, seeds: Iterable[int]) -> dict[str, float]:
    """The share of each end."""
    ends = [judge(seed) for seed in seeds]
    return {end: ends.count(end) / len(ends) for end in ("pass", "hold", "reject")}


def share_wrong(kind: JobKind, ends: dict[str, float]) -> float:
    """Share of jobs that were refused though they must pass, or passed though they must not."""
    return ends["reject" if kind.must == "pass" else "pass"]


# T2: the live watch.


def watched_before(curve: Curve) -> Judge:
    def judge(seed: int) -> str:
        polls = 0
        for metrics in curve.polls(seed):
            losses = _after_warm_up(metrics, curve)
            polls = polls + 1 if losses and before.is_diverging(losses) else 0
            if polls == LIVE_DIVERGING_POLLS:
                return "reject"
        return "pass"

    return judge


def watched(curve: Curve) -> Judge:
    def judge(seed: int) -> str:
        watch = DivergenceWatch()
        for metrics in curve.polls(seed):
            losses = _after_warm_up(metrics, curve)
            watch, gate = watch_losses(watch, metrics["steps"][-len(losses) :], losses)
            if gate is not None:
                return "reject"
        return "pass"

    return judge


def _after_warm_up(metrics: dict[str, Any], curve: Curve) -> list[float]:
    pairs = zip(metrics["steps"], metrics["training_loss"], strict=True)
    return [loss for step, loss in pairs if step > curve.warmup_steps]


def live(name: str, curve: Curve, *, diverges: bool = False, most: float = 0.01) -> JobKind:
    must: Literal["pass", "be refused"] = "be refused" if diverges else "pass"
    return JobKind(f"T2 {name}", must, watched_before(curve), watched(curve), most)


# T3, T4 and T9: losses by row.


def gate_of(metrics: dict[str, Any], name: str, job: FinishedJob, **rules: Any) -> str:
    """The end by one gate alone; a note and a warning go on."""
    champion = None if name == "T9" else CHAMPION
    verdict = judge_training(job, metrics, champion, TrainingRules(**rules))
    gates = [gate.state for gate in verdict.gates if gate.name.startswith(f"{name} ")]
    worst = [state for state in ("reject", "hold") if state in gates]
    return worst[0] if worst else "pass"


def by_rows(
    name: str,
    gate: str,
    rows: Rows,
    must: Literal["pass", "be refused"],
    most: float,
    most_holds: float = 0.0,
) -> JobKind:
    job = FinishedJob("completed", "ft:base:m:2", "base", 11, "ds_v", "aa", rows.rows)

    def judge_before(seed: int) -> str:
        losses, champion = rows.mean_losses(seed)
        if gate == "T9":  # it was off
            return "pass"
        return before.learned(losses) if gate == "T3" else before.against_champion(losses, champion)

    def judge_after(seed: int) -> str:
        return gate_of(rows.metrics(seed), gate, job)

    return JobKind(f"{gate} {name}", must, judge_before, judge_after, most, most_holds)


# T0, T1, T5 and T7: rules without chance.


def ruled(
    name: str,
    gate: str,
    must: Literal["pass", "be refused"],
    was: str,
    job: FinishedJob,
    losses: Sequence[float | None],
    **rules: Any,
) -> JobKind:
    every = rules.pop("every", 1)
    training = rules.pop("training", [1.0] * len(losses))
    metrics = {
        "steps": [every * (number + 1) for number in range(len(losses))],
        "training_loss": training,
        "validation_loss": list(losses),
    }
    return JobKind(
        f"{gate} {name}", must, lambda _: was, lambda _: gate_of(metrics, gate, job, **rules), 0.0
    )


def job_of(steps: int, examples: int = 500, duplicates: int | None = None) -> FinishedJob:
    return FinishedJob(
        "completed", "ft:base:m:2", "base", steps, "ds_v", "aa", examples, duplicates
    )


# T10: the smoke test.


def smoked(name: str, ours: float, theirs: float, most: float) -> JobKind:
    def judge(seed: int) -> str:
        pair = answers(2 * seed, theirs, 20), answers(2 * seed + 1, ours, 20)
        return judge_smoke(*pair).state

    return JobKind(
        f"T10 {name}",
        "pass" if ours == theirs else "be refused",
        lambda seed: before.smoke(answers(2 * seed + 1, ours, before.PROMPTS)),
        judge,
        most,
    )


FALLING = [2.0, 1.6, 1.3, 1.1, 1.0]
LOW = Rows(champion_loss=0.138, row_noise=0.05)

KINDS = {
    kind.name: kind
    for kind in (
        ruled("a server logs every 20th of 139 steps", "T0", "pass", "reject", job_of(139), [*FALLING, 0.9], every=20),
        ruled("one NaN among 200 steps", "T1", "pass", "reject", job_of(200), 40 * FALLING,
              training=[math.nan if step == 100 else 1.0 for step in range(200)]),
        ruled("two validation points", "T1", "pass", "reject", job_of(20), [2.0] * 10 + [1.0] * 10),
        ruled("NaN in the last tenth", "T1", "be refused", "reject", job_of(200), 40 * FALLING,
              training=[math.nan if step > 197 else 1.0 for step in range(200)]),
        *(live(f"healthy, batches of {size}", Curve(noise=0.8 / math.sqrt(size))) for size in (1, 2, 4, 8, 16, 32, 64)),
        live("healthy, batches of 1, 1,500 steps that hardly fall", Curve(first=1.3, noise=0.8, steps=1500)),
        live("healthy, from 6 to 0.1, noise doubles", Curve(first=6.0, last=0.1, noise=0.3, noise_growth=2.0)),
        live("healthy, every 20th batch three times as high", Curve(noise=0.3, spike_share=0.05)),
        live("healthy, warm-up of 50 steps", Curve(noise=0.3, warmup_steps=50)),
        live("healthy, every 20th of 3,000 steps logged", Curve(noise=0.4, steps=3000, logged_every=20)),
        live("+1/60 a step from step 300, noise 30 %", Curve(steps=600, diverges_at=300), diverges=True),
        live("the same, noise 80 %", Curve(noise=0.8, steps=600, diverges_at=300), diverges=True, most=0.05),
        live("the same, from 6 to 0.1", Curve(first=6.0, last=0.1, steps=600, diverges_at=300),
             diverges=True, most=0.05),
        by_rows("learned nothing, 50 rows", "T3", Rows(rows=50), "be refused", 0.02),
        by_rows("learned nothing, 200 rows", "T3", Rows(), "be refused", 0.01),
        by_rows("learned nothing, rows differ by 20 %", "T3", Rows(row_noise=0.2), "be refused", 0.01),
        by_rows("1.5 % better, rows differ by 2 %", "T3", Rows(start=1.015, row_noise=0.02), "pass", 0.4),
        by_rows("10 % better", "T3", Rows(start=1.1, rows=400), "pass", 0.02),
        by_rows("equal, 50 rows", "T4", Rows(rows=50), "pass", 0.04, 0.76),
        by_rows("equal, 200 rows", "T4", Rows(), "pass", 0.04, 0.36),
        by_rows("equal, 1,000 rows", "T4", Rows(rows=1000), "pass", 0.02, 0.05),
        *(by_rows(f"equal, short answers, {rows:,} rows", "T4", replace(SHORT_ANSWERS, rows=rows), "pass", 0.04, holds)
          for rows, holds in ((50, 0.7), (200, 0.33), (400, 0.1), (1000, 0.02))),
        *(by_rows(f"{share:.0%} worse, short answers, {rows:,} rows".replace("%", " %"), "T4",
                  replace(SHORT_ANSWERS, rows=rows, candidate=1 + share), "be refused", most)
          for share, rows, most in ((0.15, 200, 0.12), (0.3, 200, 0.02), (0.15, 1000, 0.02))),
        by_rows("3.00 v 3.03, within the margin", "T4",
                Rows(champion_loss=3.0, candidate=1.01, row_noise=0.02, rows=400), "pass", 0.03, 0.2),
        by_rows("0.04 worse, 200 rows", "T4", Rows(candidate=1 + 0.04 / 1.5, row_noise=0.05), "be refused", 0.1),
        by_rows("0.06 worse, best of 80 measurements", "T4", Rows(candidate=1.04, settings=8), "be refused", 0.08),
        by_rows("0.138 v 0.157", "T4", Rows(champion_loss=0.138, candidate=1.138, row_noise=0.05), "be refused", 0.01),
        by_rows("0.05 v 0.069", "T4", Rows(champion_loss=0.05, candidate=1.38, row_noise=0.05), "be refused", 0.0),
        by_rows("wrong labels in training", "T9", Rows(candidate=1.3), "be refused", 0.0),
        ruled("diverges at 60 % and serves its last", "T5", "be refused", "pass", job_of(5), [2.0, 1.0, 1.5, 2.0, 3.0],
              training=[2.0, 1.0, 1.5, 2.0, 3.0], best_checkpoint_served=False),
        ruled("one duplicate of 992 rows", "T7", "pass", "hold", job_of(5, 992, 1), FALLING),
        ruled("half of the rows are duplicates", "T7", "be refused", "hold", job_of(5, 992, 496), FALLING),
        smoked("equal, 1 % faults", 0.01, 0.01, 0.001),
        smoked("equal, 2 % faults", 0.02, 0.02, 0.003),
        smoked("equal, 5 % faults", 0.05, 0.05, 0.02),
        smoked("15 % v 0 % faults", 0.15, 0.0, 0.7),
        smoked("30 % v 0 % faults", 0.3, 0.0, 0.13),
        smoked("50 % v 0 % faults", 0.5, 0.0, 0.01),
    )
}  # fmt: skip
