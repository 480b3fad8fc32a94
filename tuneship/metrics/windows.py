"""The counts of one span of time; windows can be merged, so a minute is sixty seconds merged. Pure.

Latencies are counted by the logarithmic index of DDSketch (VLDB 2019, `ddsketch`): any percentile is within 1 % of the
true value, and merging loses nothing. Percentiles and the stored form: `tuneship/metrics/columns.py`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

from ddsketch.mapping import LogarithmicMapping  # pyright: ignore[reportMissingTypeStubs]

from tuneship.metrics.observations import Observation, RequestOutcome

MAPPING: Any = LogarithmicMapping(relative_accuracy=0.01)
# Latencies are clamped to this range, so that an index fits into 16 bits.
SHORTEST_MS, LONGEST_MS = 0.01, 1e8
# Cell k holds values in (2^((k-1)/16), 2^(k/16)]: each is 4.4 % wider than the one before.
CELLS_PER_DOUBLING = 16


@dataclass
class MetricWindow:
    """The counts of a span of time. `latencies` maps a sketch index to a number of successful requests.

    Requests of batches have no latencies, and neither do repeats.
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
    # Hashes of the callers who got the errors, who disconnected, and who were refused.
    error_callers: set[int] = field(default_factory=set[int])
    cancelled_callers: set[int] = field(default_factory=set[int])
    refused_callers: set[int] = field(default_factory=set[int])
    # By cell, of the requests in `latencies`: milliseconds per output token, and output tokens.
    per_token: dict[int, int] = field(default_factory=dict[int, int])
    answer_tokens: dict[int, int] = field(default_factory=dict[int, int])
    # Requests by the hash of their routing key, where a split keeps it at one deployment.
    sticky_keys: dict[int, int] = field(default_factory=dict[int, int])
    # The largest numbers seen.
    spread_keys: int = 0
    replicas: int = 0
    # Requests of small keys beyond their share (`Recorder.record`): counted above, but left out by the gates.
    repeated_requests: int = 0
    repeated_errors: int = 0
    repeated_empty: int = 0
    repeated_cancelled: int = 0
    repeated_refused: int = 0
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

    def add(self, observation: Observation, *, is_repeat: bool = False) -> None:
        """Count one request."""
        if observation.replicas > self.replicas:
            self.replicas = observation.replicas
        if observation.spread_keys > self.spread_keys:
            self.spread_keys = observation.spread_keys
        if observation.sticky_key is not None:
            _add_one(self.sticky_keys, observation.sticky_key)
        outcome, callers = observation.outcome, self.error_callers
        if outcome is RequestOutcome.CANCELLED:
            self.cancelled_count += 1
            self.repeated_cancelled += is_repeat
            callers = self.cancelled_callers
        elif outcome is RequestOutcome.REFUSED:
            self.refused_count += 1
            self.repeated_refused += is_repeat
            callers = self.refused_callers
        else:
            self.request_count += 1
            self.repeated_requests += is_repeat
            self.input_tokens += observation.prompt_tokens
            self.output_tokens += observation.completion_tokens
            if outcome is RequestOutcome.SUCCESS:
                self._add_success(observation, is_repeat=is_repeat)
                return
            self.error_count += 1
            self.repeated_errors += is_repeat
        if observation.caller is not None:
            callers.add(observation.caller)

    def _add_success(self, observation: Observation, *, is_repeat: bool) -> None:
        self.empty_count += observation.is_empty
        self.repeated_empty += is_repeat and observation.is_empty
        if observation.embedded_texts:
            self.embedding_count += 1
            self.embedded_texts += observation.embedded_texts
            self.embedded_tokens += observation.prompt_tokens
        if observation.is_background or is_repeat:
            return
        time_ms, tokens = observation.latency_ms, observation.completion_tokens
        self.latency_sum_ms += time_ms
        _count(self.latencies, time_ms)
        _add_one(self.per_token, cell_of(time_ms / max(tokens, 1)))
        _add_one(self.answer_tokens, cell_of(tokens))
        if observation.first_token_ms is not None:
            self.first_token_sum_ms += observation.first_token_ms
            _count(self.first_tokens, observation.first_token_ms)

    def copy(self) -> "MetricWindow":
        """An independent window with the same counts."""
        copied = MetricWindow()
        copied.merge(self)
        return copied

    def merge(self, other: "MetricWindow") -> None:
        """Add another window's counts."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in _LARGEST:
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in _UNITED:
            getattr(self, name).update(getattr(other, name))
        for name in _COUNTED:
            own, more = getattr(self, name), getattr(other, name)
            for index, count in more.items():
                own[index] = own.get(index, 0) + count


# How each field is merged.
_LARGEST = ("spread_keys", "replicas")
_UNITED = ("error_callers", "cancelled_callers", "refused_callers")
_COUNTED = ("latencies", "per_token", "answer_tokens", "sticky_keys", "first_tokens")
_SUMMED = tuple(
    name
    for name in MetricWindow.__dataclass_fields__
    if name not in (*_LARGEST, *_UNITED, *_COUNTED)
)


def cell_of(value: float) -> int:
    """The cell of a time in ms or of a number of tokens; 0 is in that of the smallest values."""
    clamped = min(max(value, SHORTEST_MS), LONGEST_MS)
    return math.ceil(CELLS_PER_DOUBLING * math.log2(clamped))


def _count(sketch: dict[int, int], time_ms: float) -> None:
    _add_one(sketch, MAPPING.key(min(max(time_ms, SHORTEST_MS), LONGEST_MS)))


def _add_one(counts: dict[int, int], index: int) -> None:
    counts[index] = counts.get(index, 0) + 1
