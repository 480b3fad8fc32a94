"""The sentences of a report for the verdict of an evaluation. Pure."""

from tuneship.contract.common import count
from tuneship.gates.evaluation.paired import Estimate, PairedCounts, provable_margin
from tuneship.gates.evaluation.verdict import (
    MIN_CLUSTERS,
    MIN_EXAMPLES,
    WORSE,
    EvaluationResult,
    GraderResult,
    SliceResult,
)

# With fewer examples, most equal candidates cannot pass at the usual margin.
FEW_EXAMPLES = 400
SLICE_WORDS = {"no_harm_shown": "no harm shown", "reject": "worse", "not_tested": "not tested"}


def sentence(result: EvaluationResult) -> str:
    """The verdict in one sentence, with what it rests on."""
    named = f"{result.grader}: " if result.grader and len(result.rules.gating) > 1 else ""
    return named + _sentence(result)


def _sentence(result: EvaluationResult) -> str:
    match result.reason:
        case "worse_in_slice":
            return "; ".join(
                slice_sentence(one, result.rules.slice_margin)
                for one in result.slices
                if one.verdict == "reject"
            )
        case "worse" | "inconclusive" | None:
            return _of_grader(result, _decider(result))
        case "below_min_score":
            score = f"{100 * _decider(result).candidate.value:.1f} %"
            least = f"{100 * (result.rules.min_score or 0.0):g} %"
            return f"score {score} on {_examples(result.examples.scored)}, below {least}"
        case _:
            return f"not decided: {_why_not(result)}"


def slice_sentence(one: SliceResult, slice_margin: float) -> str:
    """The finding about one slice: harm, no harm shown, or not tested."""
    words = (
        f"{one.field} {one.value}: {SLICE_WORDS[one.verdict]} on {_examples(one.counts.examples)}"
    )
    if one.difference is None:
        return words
    return f"{words}: {_evidence(one.counts, one.difference, slice_margin)}"


def _decider(result: EvaluationResult) -> GraderResult:
    """The grader that the sentence is about: that of the reason, or else the first that decides."""
    name = result.grader or result.rules.gating[0]
    return next(one for one in result.graders if one.grader == name)


def _of_grader(result: EvaluationResult, one: GraderResult) -> str:
    examples = _examples(one.counts.examples)
    if one.baseline is None or one.difference is None:
        score = one.candidate
        interval = f"{100 * score.low:.1f} to {100 * score.high:.1f}"
        return f"score {100 * score.value:.1f} % (95 % interval {interval}) on {examples}"
    match result.verdict:
        case "pass":
            head = "not worse on"
        case "reject":
            head = "worse, stopped after" if result.stopped_early else "worse on"
        case _:
            head = "not decided on"
    words = f"{head} {examples}: {_evidence(one.counts, one.difference, result.rules.margin)}"
    return words + (_more(result, one) if result.verdict == "hold" else "")


def _more(result: EvaluationResult, one: GraderResult) -> str:
    """The words about what would decide."""
    if one.p_worse is not None and one.p_worse <= WORSE / len(result.rules.gating):
        return "; worse, and not surely by more than the margin"
    words = f"; about {one.examples_needed:,} examples would do" if one.examples_needed else ""
    # Of clusters, the number of examples alone says too little.
    if one.counts.examples < FEW_EXAMPLES and one.log_e is not None:
        words += f"; so few can prove a margin of {_points(provable_margin(one.counts), 0)}"
    return words


def _why_not(result: EvaluationResult) -> str:
    counts = result.examples
    match result.reason:
        case "grader_failed":
            timed_out = next(g.timed_out for g in counts.graders if g.grader == result.grader)
            return f"grader {result.grader} ran out of time on {_examples(timed_out)}"
        case "too_few_examples":
            return f"{_examples(counts.scored)}, and {MIN_EXAMPLES} are needed"
        case "failed_answers":
            return f"no answers to {counts.failed:,} of {_examples(counts.scored + counts.failed)}"
        case "leaked_examples":
            return f"{counts.leaked:,} of {_examples(counts.selected)} stand in training data"
        case "too_few_clusters":
            return f"fewer than {MIN_CLUSTERS} clusters"
        case _:
            return f"no right answer by grader {result.grader}"


def _evidence(counts: PairedCounts, difference: Estimate, margin: float) -> str:
    wins, losses = count(counts.wins, "win"), count(counts.losses, "loss", "losses")
    interval = f"{_signed(difference.low)} to {_signed(difference.high)} points"
    return f"{wins}, {losses}; 90 % interval {interval}, margin {_points(margin, 1)}"


def _examples(number: int) -> str:
    return count(number, "example")


def _signed(share: float) -> str:
    # Adding 0 turns -0.0, which a small negative number is rounded to, into 0.0.
    return f"{round(100 * share, 1) + 0.0:+.1f}"


def _points(share: float, digits: int) -> str:
    number = f"{round(100 * share, digits):g}"
    return f"{number} point" if number == "1" else f"{number} points"
