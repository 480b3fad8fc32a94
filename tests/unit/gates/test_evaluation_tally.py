"""The counts of an evaluation: the order of the examples changes nothing that is shown or decided."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tuneship.contract.evaluations import EvaluationSettings
from tuneship.gates.evaluation.evaluation_report import report_of
from tuneship.gates.evaluation.evaluation_tally import rules_of, tally_of
from tuneship.gates.evaluation.verdict import judge, record_of, replay

SHARE = {"type": "text_similarity", "evaluation_metric": "rouge_l"}
GRADERS = [
    {"name": "same", "type": "string_check"},
    {"name": "alike", "pass_threshold": 0.5, **SHARE},
    {"name": "overlap", **SHARE},
]


@st.composite
def scores(draw: st.DrawFn) -> dict[str, float]:
    right = st.sampled_from([0.0, 1.0])
    return {"same": draw(right), "alike": draw(right), "overlap": draw(st.floats(0, 1))}


@st.composite
def stored(draw: st.DrawFn, *, has_baseline: bool, has_clusters: bool) -> dict[str, Any]:
    """One example as it is stored."""
    made: dict[str, Any] = {"line": 1, "slices": {"site": draw(st.sampled_from("ABC"))}}
    made["outcome"] = draw(st.sampled_from(["scored"] * 9 + ["failed", "leaked", "too_long"]))
    if has_clusters:
        made["cluster"] = draw(st.integers(0, 60))
    if made["outcome"] == "scored":
        made["candidate"] = draw(scores())
        made["timed_out"] = draw(st.sampled_from([(), (), ("same",)]))
        if has_baseline:
            made["baseline"] = draw(scores())
    return made


@st.composite
def evaluations(draw: st.DrawFn) -> tuple[list[dict[str, Any]], EvaluationSettings, bool]:
    """A few examples, each of which is there several times, and whether there is a baseline."""
    has_baseline, has_clusters = draw(st.booleans()), draw(st.booleans())
    one = stored(has_baseline=has_baseline, has_clusters=has_clusters)
    kinds = draw(st.lists(st.tuples(one, st.integers(1, 60)), max_size=8))
    settings = {
        "graders": GRADERS,
        "gating": draw(st.sampled_from([["same"], ["same", "alike"]])),
        "slice_by": ["site"],
        "min_slice": 10,
        "min_score": draw(st.none() | st.floats(0, 1)),
    }
    examples = [example for example, times in kinds for _ in range(times)]
    return examples, EvaluationSettings.model_validate(settings), has_baseline


@given(evaluations(), st.integers(0, 2**32))
def test_permuted_examples_change_nothing_and_are_replayed(
    drawn: tuple[list[dict[str, Any]], EvaluationSettings, bool], seed: int
) -> None:
    examples, settings, has_baseline = drawn
    permuted = [*examples]
    random.Random(seed).shuffle(permuted)  # noqa: S311 - only for tests
    rules = rules_of(settings, has_baseline=has_baseline)
    tallies = [tally_of(settings, some) for some in (examples, permuted)]
    found = [judge(tally.counts, rules) for tally in tallies]
    assert found[0] == found[1]
    assert replay(record_of(found[1])) == found[0]
    reports = [
        report_of(tally, one, has_ended=True) for tally, one in zip(tallies, found, strict=True)
    ]
    assert reports[0] == reports[1]
