"""Draws training jobs from a seed: losses by step, losses by validation row, and answers to prompts.

The sizes are assumptions: the noise of a loss falls with the root of the batch size, and a row's loss differs from
one model to another by a share of itself. `SHORT_ANSWERS` were measured.
"""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tuneship.gates.smoke_test import SmokeAnswer

MEAN_LOSS = 1.5
EVALUATIONS = 10
STEPS_OF_JOB = 300


def dice(seed: int) -> random.Random:
    """Random numbers that are the same for the same seed."""
    return random.Random(seed)  # noqa: S311 - a test draws these numbers


@dataclass(frozen=True)
class Curve:
    """The training losses of a job: an exponential fall, log-normal noise, and from some step on a rise."""

    first: float = 1.6
    last: float = 1.2
    # Standard deviation of the logarithm of a loss.
    noise: float = 0.3
    steps: int = STEPS_OF_JOB
    # A rise of 1/60 of the loss a step.
    diverges_at: int | None = None
    logged_every: int = 1
    warmup_steps: int = 0
    # A tail of rare high losses, as a batch of one long row has them.
    spike_share: float = 0.0
    # Noise at the last step relative to that at the first.
    noise_growth: float = 1.0

    def losses(self, seed: int) -> list[float]:
        """One loss a step."""
        draw = dice(seed)
        losses: list[float] = []
        for step in range(self.steps):
            warming = max(0.0, 1.0 - step / self.warmup_steps) if self.warmup_steps else 0.0
            level = self.last + (self.first - self.last) * math.exp(-step / 40.0)
            level += 0.3 * self.first * warming
            if self.diverges_at is not None and step > self.diverges_at:
                level *= 1.0 + (step - self.diverges_at) / 60.0
            noise = self.noise * (1.0 + (self.noise_growth - 1.0) * step / self.steps)
            loss = level * math.exp(draw.gauss(-(noise**2) / 2.0, noise))
            losses.append(loss * (3.0 if draw.random() < self.spike_share else 1.0))
        return losses

    def polls(self, seed: int) -> Iterator[dict[str, Any]]:
        """The metrics at each poll, which comes after 1 to 20 more steps."""
        losses, draw, step = self.losses(seed), dice(seed + 1), 0
        while step < self.steps:
            step = min(self.steps, step + draw.randint(1, 20))
            steps = list(range(self.logged_every, step + 1, self.logged_every))
            yield {"steps": steps, "training_loss": [losses[at - 1] for at in steps]}


@dataclass(frozen=True)
class Rows:
    """Losses of validation rows under the champion, the start, and the checkpoints of several settings."""

    rows: int = 200
    # The candidate's mean loss, and the start's, relative to the champion's.
    candidate: float = 1.0
    start: float = 1.0
    champion_loss: float = MEAN_LOSS
    # How much a row's loss differs between two models, as a share of itself.
    row_noise: float = 0.1
    settings: int = 1

    def metrics(self, seed: int) -> dict[str, Any]:
        """The metrics of the chosen job: by its lowest measurement, on the rows that choose where there are any."""
        return min(self._jobs(seed), key=lambda job: job[0])[1]

    def mean_losses(self, seed: int) -> tuple[list[float], float]:
        """The job with the lowest measurement on all rows, and the champion's loss: all that gates saw before."""
        draw, levels = self._draws(seed)
        champion = self._model(draw, levels, 1.0)
        start = self._model(draw, levels, self.start)
        jobs = [
            [
                _mean(start),
                *(_mean(self._model(draw, levels, self.candidate)) for _ in range(EVALUATIONS)),
            ]
            for _ in range(self.settings)
        ]
        return min(jobs, key=min), _mean(champion)

    def _draws(self, seed: int) -> tuple[random.Random, list[float]]:
        draw = dice(seed)
        levels = [math.exp(draw.gauss(-0.18, 0.6)) * self.champion_loss for _ in range(self.rows)]
        return draw, levels

    def _model(self, draw: random.Random, levels: Sequence[float], factor: float) -> list[float]:
        return [max(1e-6, one * factor * (1.0 + draw.gauss(0.0, self.row_noise))) for one in levels]

    def _jobs(self, seed: int) -> Iterator[tuple[float, dict[str, Any]]]:
        draw, levels = self._draws(seed)
        champion = self._model(draw, levels, 1.0)
        start = self._model(draw, levels, self.start)
        judges = 2 * self.rows // 3
        judge = [True] * judges + [False] * (self.rows - judges)
        draw.shuffle(judge)
        for _ in range(self.settings):
            models = [self._model(draw, levels, self.candidate) for _ in range(EVALUATIONS)]
            measured = [
                _mean([x for x, is_judge in zip(one, judge, strict=True) if not is_judge])
                for one in models
            ]
            served = models[measured.index(min(measured))]
            steps = list(range(1, EVALUATIONS + 2))
            yield (
                min(measured),
                {
                    "steps": steps,
                    "training_loss": [1.0] * len(steps),
                    "validation_loss": [_mean(start), *measured],
                    "row_losses": {
                        "rows": list(range(1, self.rows + 1)),
                        "judge": judge,
                        "trained_on": [False] * self.rows,
                        "start": start,
                        "served": served,
                        "compared": champion,
                        "compared_model": "ft:base:champion:1",
                    },
                },
            )


# Seven trainings of the tiny model on 800 rows of `examples/icd10cm`, which differ in nothing but their seeds: over its
# 992 validation rows of a few tokens each, the difference of a row has a standard deviation of 0.68 of the mean loss,
# which is 0.22 on average.
SHORT_ANSWERS = Rows(champion_loss=0.22, row_noise=0.4)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def answers(seed: int, share: float, prompts: int) -> list[SmokeAnswer]:
    """Answers to prompts, of which a share fails."""
    draw = dice(seed)
    good = SmokeAnswer(200, "Diseases of the eye", "stop", output_tokens=10, latency_ms=100.0)
    return [SmokeAnswer(500) if draw.random() < share else good for _ in range(prompts)]
