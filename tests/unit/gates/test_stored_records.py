"""Records that were written by other versions are decided again bit by bit by the gates of today.

`before-pauses-*` were written by `shift_traffic` of the first release, 26.12.0, `paused-and-reverted` by the version
that let a person pause and revert a rollout, each against the fake service of the flows' tests.
"""

import lzma
from pathlib import Path

import pytest

from tuneship.gates.canary import first_difference, replay
from tuneship.gates.record import ApprovalAnswered, Ended, Resumed, RolloutRecord, from_lines
from tuneship.gates.reports.rollout_facts import facts_of

RECORDS = Path(__file__).parents[2] / "data" / "records"
ENDS = {
    "before-pauses-promoted": Ended("promoted", "none"),
    "before-pauses-rolled-back": Ended("rolled_back", "error_rate"),
    "paused-and-reverted": Ended("rolled_back", "human_rejected"),
}


def stored(name: str) -> RolloutRecord:
    """A record from its lines, whose hashes are checked as they are read."""
    return from_lines(
        lzma.decompress((RECORDS / f"{name}.jsonl.xz").read_bytes()).decode().split("\n")
    )


@pytest.mark.parametrize("name", ENDS)
def test_each_look_is_decided_again_as_it_was(name: str) -> None:
    record = stored(name)
    assert record.facts[-1] == ENDS[name]
    pairs = [*replay(record)]
    assert len(pairs) == len(record.looks) > 5
    assert [first_difference(*pair) for pair in pairs] == [None] * len(pairs)


def test_an_old_answer_is_reported_as_it_was() -> None:
    """Its result is verified against its record, field by field, and had no person."""
    record = stored("before-pauses-promoted")
    assert facts_of(record)["approval"] == {"decision": "promote", "approver": "Ann", "comment": ""}


def test_pauses_and_the_person_who_reverted_are_in_the_record() -> None:
    record = stored("paused-and-reverted")
    paused = [look.number for look in record.looks if look.is_paused]
    assert len(paused) > 10
    # Two pauses: the first was lifted.
    assert paused != [*range(paused[0], paused[-1] + 1)]
    assert sum(isinstance(fact, Resumed) for fact in record.facts) == 1
    assert isinstance(record.answer, ApprovalAnswered)
    assert record.answer.person is not None
    assert facts_of(record)["approval"]["person"] == record.answer.person.model_dump()
