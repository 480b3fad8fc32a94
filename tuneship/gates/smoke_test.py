"""Gate T10: answers of both deployments to the same prompts, while the candidate has no traffic."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median_low

from tuneship.gates.gate_result import GateResult
from tuneship.gates.kinds import is_repetitive

MAX_TIME_PER_TOKEN_RATIO = 3.0
# Fewer prompts that both answered do not show which one is slower.
MIN_TIMED_PROMPTS = 5
# Prompts that only the candidate fails: fewer are chance, and so are fewer times what only the baseline fails.
MIN_FAILURES, MAX_FAILURE_RATIO = 4, 3


@dataclass(frozen=True)
class SmokeAnswer:
    """One answer of a deployment to a fixed prompt, after the client's usual retries."""

    status: int
    completion: str = ""
    finish_reason: str | None = None
    output_tokens: int = 0
    latency_ms: float = 0.0

    @property
    def problem(self) -> str | None:
        """Why this is no sensible answer; None for one that is."""
        if self.status != 200:
            return f"status {self.status}"
        if not self.completion.strip():
            return "empty completion"
        if self.finish_reason not in ("stop", "length"):
            return "unknown finish_reason"
        return "repeats itself" if is_repetitive(self.completion) else None

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per token; None where there was no token, or the answer does not say how many."""
        is_known = self.status == 200 and self.output_tokens > 0
        return self.latency_ms / self.output_tokens if is_known else None


def judge_smoke(baseline: Sequence[SmokeAnswer], candidate: Sequence[SmokeAnswer]) -> GateResult:
    """T10: the candidate fails no more prompts than the baseline does, and is not far slower per token.

    Both answered the same prompts in this order. Refused is who fails four prompts or more (where there are fewer: all)
    that the baseline answers, and three times as many as those that the baseline alone fails. Slow is who takes more
    than three times as long on most prompts, for a token and for the whole answer: a tuned model's answer of three
    tokens has the fixed costs of one with sixty. The slowest prompt would be a machine's stall; slow tails and small
    shares of faults are for the canary, which sees enough.
    """
    name = "T10 smoke"
    if not candidate:
        return GateResult(name, "hold", note="no answers")
    pairs = list(zip_longest(candidate, baseline[: len(candidate)]))
    ours = [number for number, (one, other) in enumerate(pairs, 1) if _fails(one, other)]
    theirs = sum(_fails(other, one) for one, other in pairs if other is not None)
    if len(ours) >= max(min(MIN_FAILURES, len(pairs)), MAX_FAILURE_RATIO * theirs):
        worst = Counter(candidate[number - 1].problem for number in ours).most_common(1)[0][0]
        note = f"prompts that only the candidate fails, most: {worst}; the baseline alone: {theirs}"
        return GateResult(name, "reject", len(ours), MIN_FAILURES - 1, note)
    if all(one.problem for one in candidate):
        return GateResult(name, "hold", note=f"no prompt is answered: {candidate[0].problem}")
    note = f"prompts that fail: {len(ours)} at the candidate alone, {theirs} at the baseline alone"
    ratios = [
        min(one.ms_per_token / other.ms_per_token, one.latency_ms / other.latency_ms)
        for one, other in pairs
        if other is not None and one.ms_per_token and other.ms_per_token
    ]
    if len(ratios) < MIN_TIMED_PROMPTS:
        return GateResult(name, "pass", note=f"time per output token not known; {note}")
    slower = median_low(ratios)
    state = "pass" if slower <= MAX_TIME_PER_TOKEN_RATIO else "reject"
    note = f"times the baseline's time, per output token or in all, median; {note}"
    return GateResult(name, state, slower, MAX_TIME_PER_TOKEN_RATIO, note)


def _fails(one: SmokeAnswer, other: SmokeAnswer | None) -> bool:
    """Whether one deployment fails a prompt that the other answers."""
    return one.problem is not None and (other is None or other.problem is None)
