"""The verdict of an evaluation: its conditions, their order, its record, and the sentence about it."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tuneship.gates.evaluation.evaluation_words import sentence, slice_sentence
from tuneship.gates.evaluation.paired import ClusterSums, PairedCounts
from tuneship.gates.evaluation.verdict import (
    EvaluationCounts,
    EvaluationResult,
    EvaluationRules,
    GraderCounts,
    SliceCounts,
    judge,
    look,
    record_of,
    replay,
)

RULES = EvaluationRules(("chapter",))


def counts(wins: int, losses: int, n: int, **more: int) -> EvaluationCounts:
    """Counts of one grader that half of the ties have right."""
    right = PairedCounts(n, wins, losses, (n - wins - losses) // 2)
    return EvaluationCounts((GraderCounts("chapter", right),), **more)


def with_slice(
    examples: EvaluationCounts, wins: int, losses: int, n: int, value: str = "A"
) -> EvaluationCounts:
    one = SliceCounts("site", value, "chapter", PairedCounts(n, wins, losses))
    return replace(examples, slices=(*examples.slices, one))


EQUAL = counts(58, 62, 1000)


@pytest.mark.parametrize(
    ("examples", "verdict", "reason"),
    [
        (EQUAL, "pass", None),
        # Surely worse, and not by more than the margin.
        (counts(30, 60, 1000), "hold", "inconclusive"),
        (counts(40, 95, 1000), "reject", "worse"),
        (counts(0, 0, 200), "pass", None),
        (counts(50, 50, 300), "hold", "inconclusive"),
        (counts(20, 20, 99), "hold", "too_few_examples"),
        (counts(58, 62, 1000, failed=20), "pass", None),
        (counts(58, 62, 1000, failed=21), "hold", "failed_answers"),
        (counts(58, 62, 1000, leaked=52), "pass", None),
        (counts(58, 62, 1000, leaked=53), "hold", "leaked_examples"),
        (counts(58, 62, 1000, too_long=900), "pass", None),
        # Harm that is shown beats a reason to hold.
        (counts(1, 40, 90, failed=90), "reject", "worse"),
    ],
)
def test_the_whole_set_decides(
    examples: EvaluationCounts, verdict: str, reason: str | None
) -> None:
    found = judge(examples, RULES)
    assert (found.verdict, found.reason) == (verdict, reason)


def test_a_worked_example_is_rejected_at_a_look_and_the_equal_one_goes_on() -> None:
    found = look(counts(5, 40, 150), RULES)
    assert found is not None
    assert (found.verdict, found.reason, found.stopped_early) == ("reject", "worse", True)
    assert found.graders[0].verdict == "reject"
    assert look(EQUAL, RULES) is None
    assert look(counts(40, 95, 1000), RULES) is None
    assert look(counts(5, 40, 150), replace(RULES, stop_early=False)) is None


@pytest.mark.parametrize(
    ("graders", "losses", "is_stopped"),
    # Of 15 to 19 losses among 150 examples, E is 58, 107, 201, 379 and 721.
    [(1, 15, False), (1, 16, True), (2, 16, False), (2, 17, True), (4, 18, False), (4, 19, True)],
)
def test_a_look_needs_evidence_of_100_for_each_grader(
    graders: int, losses: int, is_stopped: bool
) -> None:
    names = ("a", "b", "c", "d")[:graders]
    fine = [GraderCounts(name, PairedCounts(150, 9, 9, 99)) for name in names[1:]]
    examples = EvaluationCounts((GraderCounts("a", PairedCounts(150, 0, losses, 99)), *fine))
    assert (look(examples, EvaluationRules(names)) is not None) == is_stopped


def test_evidence_of_a_look_counts_at_the_end_as_well() -> None:
    # With 22 examples that differ, no exact test would be as sure.
    few = counts(0, 22, 125)
    assert look(few, RULES) is not None
    assert judge(few, RULES).reason == "worse"


def test_only_more_than_the_margin_is_worse_on_a_large_set() -> None:
    """Significance alone would reject what the margin allows."""
    slightly = counts(300, 400, 5000)
    found = judge(slightly, RULES).graders[0]
    assert found.p_worse is not None
    assert found.p_worse < 0.001
    assert found.verdict == "pass"


def test_two_graders_share_the_level_and_both_must_pass() -> None:
    two = replace(RULES, gating=("chapter", "code"))
    both = [GraderCounts("chapter", PairedCounts(1000, 58, 62, 500))]

    def judged(wins: int, losses: int) -> EvaluationResult:
        code = GraderCounts("code", PairedCounts(1000, wins, losses, 500))
        return judge(EvaluationCounts((*both, code)), two)

    assert judged(58, 62).verdict == "pass"
    held = judged(80, 90)
    assert (held.verdict, held.grader) == ("hold", "code")
    worse = judged(40, 95)
    assert (worse.verdict, worse.reason, worse.grader) == ("reject", "worse", "code")


def test_a_chance_of_more_than_two_percent_is_not_enough() -> None:
    rules = replace(RULES, margin=0.01)
    assert judge(counts(100, 133, 1000), rules).verdict == "reject"  # p = .0179
    assert judge(counts(100, 132, 1000), rules).verdict == "hold"  # p = .0208


@pytest.mark.parametrize(
    ("wins", "losses", "n", "needed"),
    [
        (50, 50, 300, 2297),
        # More would not decide about what is surely worse, and an equal candidate would have passed.
        (15, 30, 500, None),
        (40, 58, 1000, None),
        (58, 62, 1000, None),
    ],
)
def test_needed_examples_are_named_while_more_would_decide(
    wins: int, losses: int, n: int, needed: int | None
) -> None:
    assert judge(counts(wins, losses, n), RULES).graders[0].examples_needed == needed


def test_a_chance_that_is_enough_for_one_grader_is_not_for_one_of_two() -> None:
    some = PairedCounts(1000, 100, 133, 500)  # p = .018
    for names, verdict in ((("chapter",), "reject"), (("chapter", "code"), "hold")):
        examples = EvaluationCounts(tuple(GraderCounts(name, some) for name in names))
        assert judge(examples, EvaluationRules(names, margin=0.01)).verdict == verdict


def test_a_grader_that_does_not_decide_is_reported() -> None:
    more = GraderCounts("overlap", PairedCounts(1000, 10, 200, 300))
    found = judge(replace(EQUAL, graders=(*EQUAL.graders, more)), RULES)
    assert found.verdict == "pass"
    assert found.graders[1].verdict is None
    assert found.graders[1].p_worse is not None


# Slices.


def test_a_slice_that_loses_rejects_and_is_named() -> None:
    worse = with_slice(EQUAL, 1, 12, 60)
    found = judge(worse, RULES)
    assert (found.verdict, found.reason) == ("reject", "worse_in_slice")
    assert found.slices[0].verdict == "reject"
    for number in range(10):
        worse = with_slice(worse, 1, 1, 60, f"B{number}")
    assert judge(worse, RULES).reason == "worse_in_slice"
    # Among twelve slices such a one comes by chance.
    assert judge(with_slice(worse, 1, 1, 60, "C"), RULES).verdict == "pass"


def test_a_slice_that_loses_less_than_its_margin_shows_no_harm() -> None:
    found = judge(with_slice(EQUAL, 20, 58, 400), RULES)
    assert found.slices[0].verdict == "no_harm_shown"
    assert found.slices[0].p_worse is not None
    assert found.slices[0].p_worse < 1e-4
    assert (
        judge(with_slice(EQUAL, 20, 58, 400), replace(RULES, slice_margin=0.05)).verdict == "reject"
    )


def test_the_level_of_slices_is_shared_by_graders() -> None:
    for names, verdict in ((("chapter",), "reject"), (("chapter", "code"), "no_harm_shown")):
        graders = tuple(GraderCounts(name, EQUAL.graders[0].counts) for name in names)
        examples = with_slice(EvaluationCounts(graders), 1, 9, 60)  # p = .0107
        assert judge(examples, EvaluationRules(names)).slices[0].verdict == verdict


def test_a_slice_of_thirty_examples_is_tested() -> None:
    for n, verdict in ((29, "not_tested"), (30, "reject")):
        assert judge(with_slice(EQUAL, 0, 12, n), RULES).slices[0].verdict == verdict


def test_a_small_slice_is_not_tested_and_takes_no_level_from_the_others() -> None:
    examples = with_slice(EQUAL, 1, 12, 60)
    for number in range(40):
        examples = with_slice(examples, 0, 20, 29, f"B{number}")
    found = judge(examples, RULES)
    assert found.reason == "worse_in_slice"
    assert {one.verdict for one in found.slices[1:]} == {"not_tested"}


def test_slices_are_tested_once_at_the_end() -> None:
    found = look(with_slice(counts(5, 40, 150), 0, 30, 60), RULES)
    assert found is not None
    assert found.slices[0].verdict == "not_tested"


# Other reasons.


def test_a_score_below_its_threshold_rejects() -> None:
    found = judge(EQUAL, replace(RULES, min_score=0.55))
    assert (found.verdict, found.reason) == ("reject", "below_min_score")
    assert judge(EQUAL, replace(RULES, min_score=0.49)).verdict == "pass"
    assert judge(counts(0, 0, 0), replace(RULES, min_score=0.49)).reason == "too_few_examples"


def test_without_a_baseline_the_threshold_alone_decides() -> None:
    alone = EvaluationCounts((GraderCounts("chapter", PairedCounts(1000, 0, 0, 593)),))
    rules = replace(RULES, has_baseline=False)
    found = judge(alone, rules)
    assert (found.verdict, found.reason, found.graders[0].baseline) == (None, None, None)
    assert found.graders[0].candidate.value == 0.593
    assert judge(alone, replace(rules, min_score=0.5)).verdict == "pass"
    assert judge(alone, replace(rules, min_score=0.6)).reason == "below_min_score"
    assert judge(with_slice(alone, 0, 0, 100), rules).slices[0].verdict == "not_tested"
    assert look(alone, rules) is None
    nothing = EvaluationCounts((GraderCounts("chapter", PairedCounts(1000, 0, 0, 0)),))
    assert judge(nothing, replace(rules, min_score=0.0)).reason == "no_right_answer"


def test_two_models_without_any_right_answer_say_that_the_grader_is_wrong() -> None:
    none = EvaluationCounts((GraderCounts("chapter", PairedCounts(1000, 0, 0, 0)),))
    assert judge(none, RULES).reason == "no_right_answer"


def test_a_grader_that_often_times_out_decides_nothing() -> None:
    def timed(out: int, wins: int, losses: int, n: int) -> EvaluationCounts:
        one = GraderCounts("chapter", PairedCounts(n, wins, losses, 50), timed_out=out)
        return EvaluationCounts((one,))

    assert judge(timed(20, 40, 95, 1000), RULES).reason == "worse"
    assert judge(timed(21, 40, 95, 1000), RULES).reason == "grader_failed"
    assert look(timed(3, 5, 40, 150), RULES) is not None
    assert look(timed(4, 5, 40, 150), RULES) is None


def clustered(clusters: int, lost: int, size: int = 10) -> EvaluationCounts:
    """Clusters of which some lose an example, and as many win one."""
    sums = ClusterSums.of(
        (size, (number < lost) - (lost <= number < 2 * lost)) for number in range(clusters)
    )
    one = PairedCounts(clusters * size, lost, lost, 100)
    return EvaluationCounts((GraderCounts("chapter", one, clusters=sums),))


def test_clusters_decide_from_fifty_on() -> None:
    assert judge(clustered(49, 15), RULES).reason == "too_few_clusters"
    found = judge(clustered(50, 15), RULES)
    assert (found.verdict, found.graders[0].log_e) == ("pass", None)


def test_clusters_are_not_looked_at_early() -> None:
    worse = PairedCounts(500, 0, 300, 100)
    sums = ClusterSums.of([(10, -6)] * 50)
    examples = EvaluationCounts((GraderCounts("chapter", worse, clusters=sums),))
    assert look(examples, RULES) is None
    assert judge(examples, RULES).reason == "worse"


def test_a_slice_needs_thirty_clusters() -> None:
    def slice_of(clusters: int) -> EvaluationCounts:
        sums = ClusterSums.of([(10, -5)] * (clusters - 1) + [(10, -3)])
        lost = PairedCounts(10 * clusters, 0, 5 * clusters - 2)
        one = SliceCounts("site", "A", "chapter", lost, sums)
        return replace(clustered(50, 15), slices=(one,))

    assert judge(slice_of(29), RULES).slices[0].verdict == "not_tested"
    assert judge(slice_of(30), RULES).reason == "worse_in_slice"


# The record.


@st.composite
def evaluations(draw: st.DrawFn) -> tuple[EvaluationCounts, EvaluationRules]:
    n = draw(st.integers(0, 400))

    def one(most: int) -> PairedCounts:
        wins = draw(st.integers(0, most))
        losses = draw(st.integers(0, most - wins))
        return PairedCounts(most, wins, losses, draw(st.integers(0, most - wins - losses)))

    names = ("a", "b", "c")[: draw(st.integers(1, 3))]
    graders = tuple(GraderCounts(name, one(n), draw(st.integers(0, 5))) for name in names)
    slices = tuple(
        SliceCounts("f", str(number), names[0], one(draw(st.integers(0, n))))
        for number in range(draw(st.integers(0, 4)))
    )
    left_out = [draw(st.integers(0, 30)) for _ in range(3)]
    rules = EvaluationRules(
        names[: draw(st.integers(1, len(names)))],
        draw(st.sampled_from([0.02, 0.03, 0.1])),
        draw(st.none() | st.floats(0, 1)),
        stop_early=draw(st.booleans()),
        has_baseline=draw(st.booleans()),
    )
    return EvaluationCounts(graders, slices, *left_out), rules


@given(evaluations())
def test_a_record_is_replayed_to_the_same_result(
    drawn: tuple[EvaluationCounts, EvaluationRules],
) -> None:
    examples, rules = drawn
    found = [result for result in (look(examples, rules), judge(examples, rules)) if result]
    for result in found:
        assert replay(record_of(result)) == result
        assert sentence(result)
        assert all(slice_sentence(one, rules.slice_margin) for one in result.slices)


@given(evaluations())
def test_the_order_of_graders_and_slices_changes_no_verdict(
    drawn: tuple[EvaluationCounts, EvaluationRules],
) -> None:
    examples, rules = drawn
    turned = replace(examples, graders=examples.graders[::-1], slices=examples.slices[::-1])
    one, other = judge(examples, rules), judge(turned, rules)
    assert (one.verdict, one.reason, one.grader) == (other.verdict, other.reason, other.grader)
    assert one.graders == other.graders[::-1]
    assert one.slices == other.slices[::-1]


@given(evaluations())
def test_no_grader_both_passes_and_is_worse(
    drawn: tuple[EvaluationCounts, EvaluationRules],
) -> None:
    examples, rules = drawn
    assume(rules.has_baseline)
    for one in judge(examples, rules).graders:
        assert one.difference is not None
        if one.verdict == "pass":
            assert one.difference.low > -rules.margin
        if one.verdict == "reject":
            assert one.difference.value < -rules.margin
            assert one.difference.low < -rules.margin


def test_a_record_of_another_rule_is_refused() -> None:
    record = record_of(judge(EQUAL, RULES)).replace('"rule_version":"1"', '"rule_version":"0"')
    with pytest.raises(ValueError, match="rule version '0'"):
        replay(record)


def test_a_record_of_a_look_that_decides_nothing_is_refused() -> None:
    record = record_of(replace(judge(EQUAL, RULES), stopped_early=True))
    with pytest.raises(ValueError, match="none does"):
        replay(record)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gating": ()}, "gating"),
        ({"gating": ("a", "a")}, "gating"),
        ({"gating": ("a", "b", "c", "d", "e")}, "gating"),
        ({"margin": 0.0}, "margin"),
        ({"margin": 0.11}, "margin"),
        ({"margin": float("nan")}, "margin"),
        ({"slice_margin": 0.02}, "slice_margin"),
        ({"slice_margin": 0.6}, "slice_margin"),
        ({"min_score": 1.1}, "min_score"),
        ({"min_slice": 0}, "min_slice"),
    ],
)
def test_rules_that_cannot_be_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(RULES, **fields)


def test_counts_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="must have counts"):
        judge(EQUAL, replace(RULES, gating=("code",)))
    with pytest.raises(ValueError, match="one grader"):
        judge(replace(EQUAL, graders=EQUAL.graders * 2), RULES)
    with pytest.raises(ValueError, match="same examples"):
        replace(EQUAL, graders=(*EQUAL.graders, GraderCounts("b", PairedCounts(999, 0, 0))))
    with pytest.raises(ValueError, match="same examples"):
        EvaluationCounts(())
    with pytest.raises(ValueError, match="slice"):
        with_slice(EQUAL, 0, 0, 1001)
    with pytest.raises(ValueError, match="below 0"):
        replace(EQUAL, failed=-1)


# Words.


def test_the_sentence_of_a_pass_has_counts_interval_and_margin() -> None:
    assert sentence(judge(counts(58, 62, 992), RULES)) == (
        "not worse on 992 examples: 58 wins, 62 losses; 90 % interval -2.2 to +1.4 points, margin 3 points"
    )


@pytest.mark.parametrize(
    ("examples", "words"),
    [
        (
            counts(40, 95, 1000),
            "worse on 1,000 examples: 40 wins, 95 losses; 90 % interval -7.4 to -3.6 points, margin 3 points",
        ),
        (
            counts(30, 60, 1000),
            (
                "not decided on 1,000 examples: 30 wins, 60 losses; 90 % interval -4.6 to -1.5 points, "
                "margin 3 points; worse, and not surely by more than the margin"
            ),
        ),
        (
            counts(30, 31, 300),
            (
                "not decided on 300 examples: 30 wins, 31 losses; 90 % interval -4.7 to +4.0 points, "
                "margin 3 points; about 1,410 examples would do; so few can prove a margin of 7 points"
            ),
        ),
        (counts(1, 1, 99), "not decided: 99 examples, and 100 are needed"),
        (
            counts(9, 9, 1000, failed=99),
            "not decided: no answers to 99 of 1,099 examples",
        ),
        (
            counts(9, 9, 1000, leaked=99),
            "not decided: 99 of 1,099 examples stand in training data",
        ),
        (
            with_slice(EQUAL, 1, 12, 60),
            (
                "site A: worse on 60 examples: 1 win, 12 losses; 90 % interval "
                "-28.4 to -9.7 points, margin 10 points"
            ),
        ),
    ],
)
def test_every_sentence_says_why(examples: EvaluationCounts, words: str) -> None:
    assert sentence(judge(examples, RULES)) == words


def test_sentences_of_rarer_verdicts_say_why() -> None:
    early = look(counts(5, 40, 150), RULES)
    assert early is not None
    assert sentence(early).startswith("worse, stopped after 150 examples: 5 wins, 40 losses")
    low = judge(EQUAL, replace(RULES, min_score=0.7))
    assert sentence(low) == "score 49.8 % on 1,000 examples, below 70 %"
    alone = judge(EQUAL, replace(RULES, has_baseline=False))
    assert sentence(alone) == "score 49.8 % (95 % interval 46.7 to 52.9) on 1,000 examples"
    assert sentence(judge(clustered(49, 15), RULES)) == "not decided: fewer than 50 clusters"
    few = replace(RULES, margin=0.01)
    assert sentence(judge(clustered(50, 15, size=7), few)).endswith("examples would do")
    slow = EvaluationCounts((replace(EQUAL.graders[0], timed_out=30),))
    assert (
        sentence(judge(slow, RULES)) == "not decided: grader chapter ran out of time on 30 examples"
    )
    none = EvaluationCounts((GraderCounts("chapter", PairedCounts(1000, 0, 0, 0)),))
    assert sentence(judge(none, RULES)) == "not decided: no right answer by grader chapter"
    two = EvaluationCounts((*EQUAL.graders, GraderCounts("code", PairedCounts(1000, 40, 95, 500))))
    found = judge(two, replace(RULES, gating=("chapter", "code"), margin=0.01))
    assert sentence(found).startswith("code: worse on 1,000 examples")
    assert sentence(found).endswith("margin 1 point")


def test_a_slice_reads_no_harm_shown_or_not_tested() -> None:
    found = judge(with_slice(with_slice(EQUAL, 3, 3, 100), 0, 0, 1, "B"), RULES)
    words = [slice_sentence(one, 0.1) for one in found.slices]
    assert words[0].startswith("site A: no harm shown on 100 examples: 3 wins, 3 losses")
    assert words[1] == "site B: not tested on 1 example"
