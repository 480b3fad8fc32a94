"""The record survives as lines, a torn last line is left out, and the derived state follows the facts."""

import base64
import zlib
from dataclasses import replace

import pytest

from tests.unit.gates.rollouts import START, Rollout, Steady, lines_of, plan_with
from tuneship.gates.metrics.kept_buckets import MOST_BYTES, unpack
from tuneship.gates.record import (
    ApprovalAsked,
    Begun,
    ChangedLine,
    Ended,
    Phase,
    Probed,
    Resumed,
    RolloutRecord,
    SplitConfirmed,
    from_lines,
    linked,
    to_line,
    to_mapping,
)


def recorded() -> RolloutRecord:
    rollout = Rollout(plan_with(bake_looks=2), Steady()).begin()
    rollout.run()
    extra = (Probed(1, 2, candidate_bad={"empty": 1}), Resumed("ada"), Ended("promoted", "none"))
    return rollout.record.plus(*extra)


def test_every_fact_survives_its_line_bit_by_bit() -> None:
    record = recorded()
    lines = lines_of(record.facts)
    assert all("\n" not in line for line in lines)
    assert from_lines(lines) == record
    assert from_lines([line + "\n" for line in lines]) == record


def test_a_line_torn_by_a_kill_is_left_out_and_damage_elsewhere_is_reported() -> None:
    lines = lines_of(recorded().facts)
    torn = [*lines[:-1], lines[-1][:10]]
    assert len(from_lines(torn).facts) == len(lines) - 1
    torn[3] = lines[3][:-5]
    with pytest.raises(ValueError, match="line 4"):
        from_lines(torn)


def test_the_phase_follows_the_confirmed_split() -> None:
    record = RolloutRecord()
    phases = [record.phase]
    for fact in (
        SplitConfirmed(5, START),
        ApprovalAsked(START),
        SplitConfirmed(100, START),
        SplitConfirmed(0, START),
    ):
        record = record.plus(fact)
        phases.append(record.phase)
    assert phases == [Phase.BEFORE, Phase.COMPARE, Phase.WAIT, Phase.BAKE, Phase.BEFORE]


def test_a_split_confirmed_twice_began_once() -> None:
    record = RolloutRecord((SplitConfirmed(5, START), SplitConfirmed(5, None)))
    assert record.step_marks()[5].at == START


def test_a_record_that_never_began_says_so() -> None:
    with pytest.raises(ValueError, match="began"):
        _ = RolloutRecord().begun


def test_a_fact_as_a_mapping_is_plain_json() -> None:
    assert to_mapping(SplitConfirmed(5, START)) == {
        "kind": "split_confirmed",
        "candidate_weight": 5,
        "at": "2026-01-01T00:00:00Z",
        "version": None,
    }


def test_a_changed_plan_is_refused_though_its_line_has_a_new_hash() -> None:
    rollout = Rollout(plan_with(), Steady()).begin()
    rollout.look()
    (begun, *rest) = rollout.record.facts
    assert isinstance(begun, Begun)
    lines = [""]
    for fact in (replace(begun, plan={**begun.plan, "alpha": 0.5}), *rest):
        lines.append(linked(lines[-1], to_line(fact)))
    with pytest.raises(ChangedLine, match="look 1 was decided by another one"):
        from_lines(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (base64.b64encode(zlib.compress(b" " * (MOST_BYTES + 1))).decode(), "more than 64 MiB"),
        (base64.b64encode(zlib.compress(b"{}")[:-4]).decode(), "cut off"),
        (base64.b64encode(b"no zlib").decode(), "cannot be unpacked"),
    ],
    ids=["huge", "cut off", "another form"],
)
def test_buckets_that_are_huge_or_damaged_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        unpack(text)
