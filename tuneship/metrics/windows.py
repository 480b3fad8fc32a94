"""The counts of one span of time; windows can be merged, so a minute is sixty seconds merged. Pure.

Latencies are counted by the logarithmic index of DDSketch (VLDB 2019, `ddsketch`): any percentile is within 1 % of the
true value, and merging loses nothing. Percentiles and the stored form: `tuneship/metrics/columns.py`.
"""

from dataclasses import dataclass, field
from typing import Any

from ddsketch.mapping import LogarithmicMapping  # pyright: ignore[reportMissingTypeStubs]

from tuneship.metrics.observations import Observation, RequestOutcome

MAPPING: Any = LogarithmicMapping(relative_accuracy=0.01)
# Latencies are clamped to this range, so that an index fits into 16 bits.
SHORTEST_MS, LONGEST_MS = 0.01, 1e8


@dataclass
class MetricWindow:
    """The counts of a span of time. `latencies` maps a sketch index to a number of successful requests.

    Requests of batches have no latencies.
    """

    # Successes and errors, without cancelled and refused requests.
    request_count: int = 0
    error_count: int = 0
    empty_count: int = 0
    latency_sum_ms: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    latencies: dict[int, int] = field(default_factory=dict[int, int])
    cancelled_count: int = 0
    refused_count: int = 0
    # Hashes of the callers who got the errors.
    error_callers: set[int] = field(default_factory=set[int])
    # What follows is kept in memory only, for `Recorder.totals`: the stored form has none of it.
    # The times to the first token of the successful requests, as a sketch.
    first_tokens: dict[int, int] = field(default_factory=dict[int, int])
    first_token_sum_ms: float = 0.0
    # Successful requests for embeddings, with their texts and the tokens of these.
    embedding_count: int = 0
    embedded_texts: int = 0
    embedded_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether no request was counted."""
        return not (self.request_count or self.cancelled_count or self.refused_count)

    def add(self, observation: Observation) -> None:
        """Count one request."""
        if observation.outcome is RequestOutcome.CANCELLED:
            self.cancelled_count += 1
            return
        if observation.outcome is RequestOutcome.REFUSED:
            self.refused_count += 1
            return
        self.request_count += 1
        self.input_tokens += observation.prompt_tokens
        self.output_tokens += observation.completion_tokens
        if observation.outcome is RequestOutcome.SERVER_ERROR:
            self.error_count += 1
            if observation.caller is not None:
                self.error_callers.add(observation.caller)
            return
        self.empty_count += observation.is_empty
        if observation.embedded_texts:
            self.embedding_count += 1
            self.embedded_texts += observation.embedded_texts
            self.embedded_tokens += observation.prompt_tokens
        if observation.is_background:
            return
        self.latency_sum_ms += observation.latency_ms
        _count(self.latencies, observation.latency_ms)
        if observation.first_token_ms is not None:
            self.first_token_sum_ms += observation.first_token_ms
            _count(self.first_tokens, observation.first_token_ms)

    def copy(self) -> "MetricWindow":
        """A window with the same counts that shares nothing with this one."""
        copied = MetricWindow()
        copied.merge(self)
        return copied

    def merge(self, other: "MetricWindow") -> None:
        """Add another window's counts."""
        self.request_count += other.request_count
        self.error_count += other.error_count
        self.empty_count += other.empty_count
        self.latency_sum_ms += other.latency_sum_ms
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cancelled_count += other.cancelled_count
        self.refused_count += other.refused_count
        self.error_callers |= other.error_callers
        self.first_token_sum_ms += other.first_token_sum_ms
        self.embedding_count += other.embedding_count
        self.embedded_texts += other.embedded_texts
        self.embedded_tokens += other.embedded_tokens
        for own, more in (
            (self.latencies, other.latencies),
            (self.first_tokens, other.first_tokens),
        ):
            for index, count in more.items():
                own[index] = own.get(index, 0) + count


def _count(sketch: dict[int, int], time_ms: float) -> None:
    index = MAPPING.key(min(max(time_ms, SHORTEST_MS), LONGEST_MS))
    sketch[index] = sketch.get(index, 0) + 1
