"""Counts and a latency sketch over a span of time; windows merge, so a minute is sixty seconds merged. Pure.

The sketch counts latencies by the logarithmic index of DDSketch (VLDB 2019, `ddsketch`): any percentile is within 1 %
of the true value, and merging loses nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ddsketch.mapping import LogarithmicMapping  # pyright: ignore[reportMissingTypeStubs]

from tuneship.metrics.observations import Observation, Outcome

_MAPPING: Any = LogarithmicMapping(relative_accuracy=0.01)
SHORTEST_MS = 0.01
EDGES_MS: tuple[float, ...] = tuple(float(2**power) for power in range(18))
"""Upper edges of the published histogram, 1 ms to 131,072 ms."""


@dataclass
class Window:
    """What happened in a span. `latencies` maps a sketch index to a count of successful requests."""

    request_count: int = 0
    """Without the caller's own errors."""
    error_count: int = 0
    empty_count: int = 0
    latency_sum_ms: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    latencies: Counter[int] = field(default_factory=Counter[int])

    def add(self, observation: Observation) -> None:
        """Count one request."""
        if observation.outcome is Outcome.CALLER_ERROR:
            return
        self.request_count += 1
        self.input_tokens += observation.prompt_tokens
        self.output_tokens += observation.completion_tokens
        if observation.outcome is Outcome.SERVER_ERROR:
            self.error_count += 1
            return
        self.empty_count += observation.is_empty
        self.latency_sum_ms += observation.latency_ms
        self.latencies[_MAPPING.key(max(observation.latency_ms, SHORTEST_MS))] += 1

    def merge(self, other: "Window") -> None:
        """Add another window's counts."""
        self.request_count += other.request_count
        self.error_count += other.error_count
        self.empty_count += other.empty_count
        self.latency_sum_ms += other.latency_sum_ms
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.latencies.update(other.latencies)

    @property
    def success_count(self) -> int:
        """Requests with a latency."""
        return self.latencies.total()

    @property
    def average_ms(self) -> float:
        """Mean latency of successful requests; call it only with some."""
        return self.latency_sum_ms / self.success_count

    @property
    def error_percentage(self) -> float:
        """0..100; call it only with requests."""
        return 100.0 * self.error_count / self.request_count

    def percentiles_ms(self, quantiles: Sequence[float]) -> list[float]:
        """Latencies at rising `quantiles` in [0, 1]; call it only with successful requests."""
        found: list[float] = []
        reached, ordered = 0, iter(sorted(self.latencies.items()))
        index = 0
        for quantile in quantiles:
            rank = quantile * (self.success_count - 1)
            while reached <= rank:
                index, count = next(ordered)
                reached += count
            found.append(_MAPPING.value(index))
        return found

    def histogram(self) -> list[int]:
        """Requests that took at most each of `EDGES_MS`, and all of them: cumulative."""
        values = [(_MAPPING.value(index), count) for index, count in self.latencies.items()]
        below = [sum(count for value, count in values if value <= edge) for edge in EDGES_MS]
        return [*below, self.success_count]

    def as_json(self) -> dict[str, Any]:
        """For the store."""
        return {
            "n": self.request_count,
            "errors": self.error_count,
            "empty": self.empty_count,
            "ms": self.latency_sum_ms,
            "in": self.input_tokens,
            "out": self.output_tokens,
            "latencies": sorted(self.latencies.items()),
        }


def window_from_json(stored: Mapping[str, Any]) -> Window:
    """From the store."""
    return Window(
        request_count=stored["n"],
        error_count=stored["errors"],
        empty_count=stored["empty"],
        latency_sum_ms=stored["ms"],
        input_tokens=stored["in"],
        output_tokens=stored["out"],
        latencies=Counter({int(index): count for index, count in stored["latencies"]}),
    )


def merged(windows: Iterable[Window]) -> Window:
    """One window over all of them."""
    total = Window()
    for window in windows:
        total.merge(window)
    return total
