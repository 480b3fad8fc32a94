"""The part of a line that is kept, and the row of a release after its lines."""

import copy
import dataclasses
import json
import math
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from tests.support.service.releases import NOON, OWN, QUESTION, ROLLOUT, begun, line_of, look
from tuneship.contract.common import SignedInPerson
from tuneship.contract.releases import (
    Release,
    ReleaseEvidence,
    ReleaseLine,
    ReleaseStatus,
)
from tuneship.gates.gate_types import ThresholdReading
from tuneship.gates.outlook import Forecast, Today, Unprovable
from tuneship.gates.record import (
    ApprovalAnswered,
    ApprovalAsked,
    Ended,
    Fact,
    Phase,
    Probed,
    Resumed,
    SplitConfirmed,
    SplitIntended,
)
from tuneship.service.console.page import page_at
from tuneship.service.console.pages.release import ReleaseStory, ReleaseView
from tuneship.service.console.rendering import PageFrame, live_part
from tuneship.service.releases.kept_lines import FIRST, LONGEST, kept_line, without_comment
from tuneship.service.releases.release_state import (
    STAGES,
    ReleaseState,
    folded,
    point_of,
    reason_of,
)

PLANTED = "Patient Alice Zebra has eczema"
EVE = SignedInPerson(issuer="https://login.example/realms/a", subject="u 1", name="Eve")
# What is a person's own to give.
OF_PEOPLE = ("approver", "by", "comment", "person")
FACTS: tuple[Fact, ...] = (
    dataclasses.replace(
        begun("dep_" + "1" * 24, "dep_" + "2" * 24),
        today=Today(120.0, by_hour=(1.0, 2.0)),
        forecast=Forecast(unprovable=(Unprovable("error", PLANTED),)),
        warnings=("low_traffic",),
        server=("finer",),
    ),
    SplitIntended(5, "advance"),
    SplitConfirmed(5, NOON, 3),
    Probed(5, 95, candidate_bad={"empty": 1}),
    look(1, 42, 5, thresholds=(ThresholdReading("error_rate", "error_rate", 0.1, 0.01, 200),)),
    ApprovalAsked(NOON, QUESTION, NOON),
    ApprovalAnswered("promote", "A. Reviewer", "looks good", EVE),
    Resumed("A. Reviewer"),
    Ended("rolled_back", "latency"),
)
GATE = {"name": "holdout_loss", "state": "pass", "value": 1.2, "limit": 1.3}
AT = "2026-03-01T12:00:00Z"
OWN_LINES: tuple[dict[str, Any], ...] = (
    {"kind": "begun", "flow_run_id": QUESTION, "endpoint_id": "cep_" + "0" * 24},
    {"kind": "release", "digest": "0" * 64},
    {
        "kind": "data",
        "dataset_id": "ds_1",
        "validation_dataset_id": "ds_2",
        "held_out_dataset_id": "ds_3",
        "training_examples": 960,
        "validation_examples": 96,
        "duplicates": 2,
    },
    {"kind": "job", "id": "ft_1"},
    {"kind": "trained", "id": "ft_1"},
    {"kind": "training_gates", "decision": "hold", "reason": "holdout_loss", "gates": [GATE]},
    {"kind": "question", "question": QUESTION, "asks": ["holdout_loss"], "until": AT},
    {
        "kind": "held_gates",
        "question": QUESTION,
        "decision": "promote",
        "approver": "A. Reviewer",
        "comment": "fine",
        "person": EVE.model_dump(),
    },
    {"kind": "baseline", "id": "dep_1"},
    {"kind": "candidate", "id": "dep_2"},
    {"kind": "smoke_test", "gates": [GATE]},
    {"kind": "evaluation", "id": "evl_1", "verdict": "pass", "gates": [GATE]},
    {"kind": "rollout", "gates": [GATE]},
    {"kind": "ended", "outcome": "promoted", "reason": "none"},
    {"kind": "model_card", "sha256": "0" * 64},
)
EMPTY = ReleaseState("release", ReleaseStatus.RUNNING, "data", *([None] * 10))  # pyright: ignore[reportArgumentType]


def planted(value: Any) -> Any:
    """The value with a text at each place where one can stand, whatever stood there."""
    if isinstance(value, dict):
        return {**{key: planted(one) for key, one in value.items()}, PLANTED: PLANTED}
    if isinstance(value, list):
        return [planted(one) for one in value] + [PLANTED]
    return PLANTED


@pytest.mark.parametrize("line", OWN_LINES, ids=lambda one: one["kind"])
def test_known_fields_of_a_release_are_kept_and_nothing_else(line: dict[str, Any]) -> None:
    more = {"notes": [PLANTED], "said": PLANTED, "content": [PLANTED], "known": {"a": PLANTED}}
    assert kept_line(OWN, {"at": AT, **line, **more}) == {"at": AT, **line}


@pytest.mark.parametrize("fact", FACTS, ids=lambda one: one.kind)
def test_facts_of_a_rollout_are_kept_without_paths_and_packed_buckets(fact: Fact) -> None:
    line = line_of(fact)
    if "plan" in line:
        line["plan"]["traffic"] = {"prompts": "prompts", "requests_per_second": 1.0}
    kept = kept_line(ROLLOUT, {**line, "newer": 1})
    assert PLANTED not in json.dumps(kept)
    assert {*kept} == {*line} - {"link"}
    assert kept.get("kept", "") == ""
    if "plan" in kept:
        assert kept["plan"]["traffic"] == {"prompts": "", "requests_per_second": 1.0}
        assert kept["plan"]["steps"] == line["plan"]["steps"]
    if fact.kind == "look":
        assert kept["gates"] == line["gates"]
        assert kept["verdict"] == "hold"


@pytest.mark.parametrize("line", [*OWN_LINES, *map(line_of, FACTS)])
def test_a_text_in_any_place_is_not_kept(line: dict[str, Any]) -> None:
    record = ROLLOUT if "link" in line else OWN
    for whole in (planted(line), {**planted(line), "kind": line["kind"]}):
        # A person's name and words are theirs to give, and tested below.
        others = {key: one for key, one in whole.items() if key not in OF_PEOPLE}
        kept = kept_line(record, others)
        assert "Zebra" not in json.dumps(kept)
    for name, value in line.items():
        if name not in OF_PEOPLE:
            assert "Zebra" not in json.dumps(kept_line(record, {**line, name: planted(value)}))


def test_kind_and_time_of_unknown_lines_are_kept() -> None:
    unknown = {"kind": "shadow", "at": AT, "text": PLANTED}
    assert (
        kept_line(OWN, unknown)
        == kept_line(ROLLOUT, unknown)
        == {"kind": "unread:shadow", "at": AT}
    )
    for bad in ({}, {"kind": 3}, {"kind": PLANTED, "at": PLANTED}, {"kind": ["look"]}):
        assert kept_line(OWN, bad) == kept_line(ROLLOUT, bad) == {"kind": "unread:"}
    half = {"kind": "look", "number": 1, "reason": "a" * 10}
    assert kept_line(ROLLOUT, half) == {"kind": "unread:look"}
    many = {**line_of(look(1, 1, 5)), "reasons": ["dwell"] * LONGEST}
    assert kept_line(ROLLOUT, many) == {"kind": "unread:look", "at": many["at"]}


@pytest.mark.parametrize("field", ["issuer", "subject", "name"])
def test_a_person_with_a_part_that_is_none_is_nobody(field: str) -> None:
    person = {**EVE.model_dump(), field: "a\nb"}
    of_rollout = {**line_of(FACTS[6]), "person": person}
    assert kept_line(ROLLOUT, of_rollout) == {**kept_line(ROLLOUT, of_rollout), "person": None}
    assert "person" not in kept_line(OWN, {**OWN_LINES[7], "person": person})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value within a line; of a list the first one."""
    yield path
    if isinstance(value, dict):
        for key, one in value.items():
            yield from places(one, (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def changed(line: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The line with another value at this place."""
    made = copy.deepcopy(line)
    at: Any = made
    for one in path[:-1]:
        at = at[one]
    at[path[-1]] = value
    return made


ODD: tuple[Any, ...] = (
    *(None, {}, 10**30, math.inf, "2026-01-01T00:00:00"),
    *("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"),
)
ADDRESS = "/console/releases/rel_" + "0" * 24


@pytest.mark.parametrize("line", [*OWN_LINES, *map(line_of, FACTS)])
def test_a_line_with_any_value_in_any_place_is_stored_and_shown(line: dict[str, Any]) -> None:
    """Otherwise one line would take a release, and every list with it, away from its tenant."""
    record = ROLLOUT if "link" in line else OWN
    page = page_at(ADDRESS)[0]
    row = {"id": "rel_1", "run_key": "k", "model_name": "m", "endpoint_name": "e"}
    row |= {"links": {}, "records": {}, "created_at": NOON, "updated_at": NOON}
    for path in places(line):
        for value in ODD if path not in ((), ("kind",)) else ():
            kept = kept_line(record, {"at": AT, **changed(line, path, value)})
            point = point_of(kept)
            state = dataclasses.asdict(folded(EMPTY, record, kept, NOON))
            # What PostgreSQL takes as JSON.
            json.dumps([kept, point, state["question"]], allow_nan=False)
            if question := state["question"]:
                question |= {"allowed": ["promote"], "needs_reason": False}
                assert (
                    question["until"] is None or datetime.fromisoformat(question["until"]) >= FIRST
                )
            found = {"looks": 1, "points": [point] if point else []}
            found["last_look"] = kept if kept["kind"] == "look" else None
            shown = ReleaseLine(record=record, number=1, at=NOON, line=kept)
            story = ReleaseStory()
            story.add(shown)
            view = ReleaseView(
                Release.model_validate({**row, **state, "question": question}),
                story,
                ReleaseEvidence.model_validate(found),
                *([None] * 5),
            )
            for reply in (view.release, view.evidence, shown):
                assert reply.model_dump_json()
            assert live_part(page, view, PageFrame("s", NOON, None, page, ADDRESS))


def test_a_person_is_named_and_not_quoted_in_hipaa_mode() -> None:
    kept = kept_line(ROLLOUT, line_of(FACTS[6]))
    assert (kept["approver"], kept["comment"]) == ("A. Reviewer", "looks good")
    assert without_comment(kept) == {**kept, "comment": ""}
    own = kept_line(OWN, OWN_LINES[7])
    assert without_comment(own) == {**OWN_LINES[7], "comment": ""}


def states(*lines: tuple[str, dict[str, Any]]) -> list[ReleaseState]:
    made = [EMPTY]
    for record, line in lines:
        made.append(folded(made[-1], record, kept_line(record, {"at": AT, **line}), NOON))
    return made[1:]


def test_each_line_of_a_release_moves_it_on() -> None:
    found = states(*((OWN, line) for line in OWN_LINES))
    assert [one.stage for one in found] == [
        "data",
        "data",
        "training",
        "training",
        "training_gates",
        *["training_gates"] * 2,
        *["deployment"] * 3,
        "evaluation",
        *["canary"] * 2,
        *["ended"] * 2,
    ]
    assert {one.stage for one in found} <= {*STAGES}
    waiting, after = found[6], found[7]
    assert (waiting.status, after.status) == (ReleaseStatus.WAITING, ReleaseStatus.RUNNING)
    assert waiting.question == {
        "id": QUESTION,
        "asks": ["holdout_loss"],
        "until": AT,
        "answer": None,
    }
    last = found[-1]
    assert (last.job_id, last.evaluation_id, last.question) == ("ft_1", "evl_1", None)
    assert (last.baseline_deployment_id, last.candidate_deployment_id) == ("dep_1", "dep_2")
    assert (last.status, last.outcome, last.ended_at) == (ReleaseStatus.ENDED, "promoted", NOON)


def test_a_rollout_says_the_split_the_phase_and_the_question() -> None:
    found = states(*((ROLLOUT, line_of(one)) for one in FACTS[:6]))
    assert [one.candidate_percentage for one in found[1:4]] == [None, 5, 5]
    assert [one.stage for one in found] == [*["canary"] * 5, "approval"]
    assert found[-1].status == ReleaseStatus.WAITING
    answered = states(*((ROLLOUT, line_of(one)) for one in FACTS[:7]))[-1]
    assert (answered.status, answered.stage, answered.question) == ("running", "bake", None)
    baking = folded(answered, ROLLOUT, line_of(look(9, 9, 80, phase=Phase.SETTLE)), NOON)
    assert baking.stage == "bake"
    # The end of a whole release is in its own record.
    assert states(*((ROLLOUT, line_of(one)) for one in FACTS))[-1].status == "running"


def test_the_end_of_a_rollout_of_its_own_is_the_end() -> None:
    alone = dataclasses.replace(EMPTY, kind="rollout")
    paused = folded(alone, ROLLOUT, line_of(Ended("paused", "max_looks")), NOON)
    assert (paused.status, paused.stage, paused.outcome) == ("paused", "data", "paused")
    again = folded(paused, ROLLOUT, line_of(Resumed("A. Reviewer")), NOON)
    assert (again.status, again.outcome, again.ended_at) == ("running", None, None)
    over = folded(again, ROLLOUT, line_of(Ended("promoted", "none")), NOON)
    assert (over.status, over.stage) == ("ended", "ended")
    # What comes late changes nothing but the split.
    late = folded(over, ROLLOUT, line_of(ApprovalAsked(NOON, QUESTION, NOON)), NOON)
    assert late == over
    split = folded(over, ROLLOUT, line_of(SplitConfirmed(100, NOON)), NOON)
    assert split == dataclasses.replace(over, candidate_percentage=100)


def test_a_question_that_is_asked_again_keeps_its_answer() -> None:
    asked = states((ROLLOUT, line_of(FACTS[5])))[-1]
    assert asked.question is not None
    given = dataclasses.replace(
        asked, question={**asked.question, "answer": {"decision": "promote"}}
    )
    again = folded(given, ROLLOUT, line_of(FACTS[5]), NOON)
    assert again.question == given.question
    other = folded(given, ROLLOUT, line_of(ApprovalAsked(NOON, "other")), NOON)
    assert other.question == {"id": "other", "asks": ["promotion"], "until": None, "answer": None}


def test_a_look_is_a_point_of_each_chart() -> None:
    seen = look(42, 42, 75)
    point = point_of(line_of(seen))
    assert point is not None
    assert (point["number"], point["weight"], point["verdict"]) == (42, 75, "hold")
    assert datetime.fromisoformat(point["at"]) == seen.at
    assert point["gates"]["error"][0] == pytest.approx(1.3)
    assert point_of({"kind": "ended"}) is None


@pytest.mark.parametrize(
    ("verdict", "reason", "reasons", "said"),
    [
        ("hold", "none", ["paused", "dwell"], "paused"),
        ("hold", "none", [], "none"),
        ("rollback", "error_rate", ["error_rate", "latency"], "error_rate"),
        ("ask", "none", ["approval"], "none"),
    ],
)
def test_a_look_that_holds_says_its_first_reason(
    verdict: str, reason: str, reasons: list[str], said: str
) -> None:
    line = {"verdict": verdict, "reason": reason, "reasons": reasons}
    assert reason_of(line) == said


def test_numbers_and_ids_that_are_none_leave_the_state_as_it_is() -> None:
    line = line_of(begun("dep_" + "1" * 24, "dep_" + "2" * 24))
    line["plan"] |= {"baseline_deployment_id": [1], "candidate_deployment_id": {"a": 1}}
    odd = folded(EMPTY, ROLLOUT, kept_line(ROLLOUT, line), NOON)
    assert (odd.baseline_deployment_id, odd.candidate_deployment_id) == (None, None)
    for weight in (-1, 101, 10**30):
        kept = kept_line(ROLLOUT, line_of(SplitConfirmed(weight, NOON)))
        assert folded(EMPTY, ROLLOUT, kept, NOON) == EMPTY
