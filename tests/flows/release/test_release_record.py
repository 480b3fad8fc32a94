"""The record of a release lets a repeated run continue, and refuses for a day what was rolled back."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flows.release.record_file import DamagedRecord, ReleaseRecord, ReleaseRecords

NOW = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
DIGEST = "d" * 64


def begun(
    records: ReleaseRecords, outcome: str | None, *, run_key: str | None = None
) -> ReleaseRecord:
    record = records.of(DIGEST, run_key)
    where = {"endpoint_id": None, "endpoint_name": "shop"}
    record.add("begun", NOW, run_key=record.path.stem, flow_run_id="run-1", **where)
    record.add("release", NOW, digest="release")
    if outcome is not None:
        record.add("ended", NOW, outcome=outcome, reason="none")
    return record


def test_a_killed_run_is_gone_on_with(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    killed = begun(records, None)
    killed.add("job", NOW, id="ft_1", content=["x"])
    again = records.of(DIGEST, None)
    assert again.path == killed.path
    assert again.made("job") == "ft_1"


def test_a_run_that_ended_gives_the_next_one_a_new_key(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    first = begun(records, "promoted")
    assert records.of(DIGEST, None).run_key != first.run_key


def test_a_paused_run_stays_open(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    paused = begun(records, "paused")
    assert records.of(DIGEST, None).path == paused.path


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    record = begun(records, None)
    with record.path.open("a") as file:
        file.write('{"kind": "job", "id": "ft_')
    assert records.of(DIGEST, None).made("job") is None


def test_a_torn_last_line_does_not_damage_what_is_written_after_it(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    record = begun(records, None)
    with record.path.open("a") as file:
        file.write('{"kind": "job", "id": "ft_')
    records.of(DIGEST, None).add("job", NOW, id="ft_2", content=[])
    assert records.of(DIGEST, None).made("job") == "ft_2"


def test_a_release_that_was_rolled_back_is_known_for_a_day(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    begun(records, "rolled_back")
    assert records.rolled_back_since("release", NOW + timedelta(hours=23)) == NOW
    assert records.rolled_back_since("release", NOW + timedelta(hours=25)) is None
    assert records.rolled_back_since("another", NOW + timedelta(hours=1)) is None


def test_a_release_that_was_promoted_may_be_tried_again(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    begun(records, "promoted")
    assert records.rolled_back_since("release", NOW) is None


def test_one_live_run_holds_its_record(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    first, second = records.of(DIGEST, None), records.of(DIGEST, None)
    assert first.hold()
    assert not second.hold()
    first.release()
    assert second.hold()
    second.release()


def test_a_run_is_found_by_its_flow_run(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    record = begun(records, None, run_key="any / key")
    found = records.of_flow_run("run-1")
    assert found is not None
    assert found.path == record.path
    assert records.of_flow_run("run-2") is None


GARBAGE = {
    "no JSON": b"\x00\x00 rows of a customer",
    "no text": b"\xff\xfe",
    "no object": b"[1]",
    "no time": b'{"kind": "job", "id": "ft_1", "content": []}',
    "a time without a zone": b'{"kind": "trained", "at": "2026-01-05T08:00:00"}',
    "a create without its id": b'{"kind": "candidate", "at": "2026-01-05T08:00:00+00:00"}',
    "an end without its outcome": b'{"kind": "ended", "at": "2026-01-05T08:00:00+00:00"}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("line", GARBAGE.values(), ids=GARBAGE)
def test_a_damaged_record_is_named_by_file_and_line_and_not_gone_on_with(
    tmp_path: Path, line: bytes
) -> None:
    records = ReleaseRecords(tmp_path)
    damaged = begun(records, None)
    with damaged.path.open("ab") as file:
        file.write(line + b"\n")
    again = ReleaseRecord(damaged.path)
    again.add("release", NOW, digest="later")

    (damage,) = [record.damage for record in records]
    assert damage == (
        f"the record {damaged.path} cannot be read in line 3:"
        " see to its job and deployment, then move it away"
    )
    assert records.of(DIGEST, None).path != damaged.path


def test_damage_in_one_record_hides_no_other(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    damaged = begun(records, None)
    damaged.path.write_bytes(b"garbage\n")
    begun(records, "rolled_back")
    assert records.rolled_back_since("release", NOW) == NOW
    assert [bool(record.damage) for record in records] == [True, False]


def test_a_damaged_record_of_a_given_key_refuses_that_key(tmp_path: Path) -> None:
    records = ReleaseRecords(tmp_path)
    damaged = begun(records, None, run_key="mine")
    damaged.path.write_bytes(b"garbage\n")
    with pytest.raises(DamagedRecord, match="line 1"):
        records.of(DIGEST, "mine")
