"""The records of rollouts on disk, and who may write them."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from flows.release.record_file import ReleaseRecord
from flows.rollout.record_file import RecordFile, RecordFolder
from tests.flows.conftest import plan
from tests.unit.gates.rollouts import lines_of
from tuneship.gates.record import Begun, Ended, SplitConfirmed, SplitIntended


def begun(rollout_id: str = "rollout-1", **changes: object) -> Begun:
    wanted = plan(**changes)
    return Begun(rollout_id, "cep_shop", wanted.model_dump(mode="json"), wanted.digest(), ())


def test_facts_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "folder" / "rollout-1.jsonl")
    file.append(begun())
    file.append(SplitIntended(5, "first step"), SplitConfirmed(5))

    again = RecordFile(file.path)

    assert again.record == file.record
    assert again.record.weight == 5


def test_a_torn_last_line_is_dropped_and_overwritten(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "rollout-1.jsonl")
    file.append(begun())
    with file.path.open("a") as torn:
        torn.write('{"kind":"split_intended","candidate_we')

    again = RecordFile(file.path)
    assert again.record == file.record
    again.append(SplitIntended(5, "first step"))

    assert RecordFile(file.path).record == file.record.plus(SplitIntended(5, "first step"))


def test_reading_a_record_that_another_process_writes_changes_nothing(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "rollout-1.jsonl")
    file.append(begun())
    with file.path.open("a") as other:
        other.write("half a line")
    before = file.path.read_bytes()

    RecordFile(file.path)

    assert file.path.read_bytes() == before


@pytest.mark.parametrize(
    ("outcome", "is_open"),
    [("promoted", False), ("rolled_back", False), ("paused", True), ("rollback_incomplete", True)],
)
def test_only_a_pause_and_an_unconfirmed_return_leave_a_record_open(
    tmp_path: Path, outcome: str, is_open: bool
) -> None:
    file = RecordFile(tmp_path / "rollout-1.jsonl")
    file.append(begun(), Ended(outcome, "none"))

    assert file.is_open is is_open


def test_a_record_is_found_by_endpoint_and_pair(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, "http://127.0.0.1:8700/")
    first = folder.new(plan())
    first.append(begun())

    assert [file.path for file in folder.of(plan())] == [first.path]
    assert [file.path for file in folder.of(plan(endpoint_id="cep_shop"))] == [first.path]
    assert folder.of(plan(candidate_deployment_id="dep_other")) == []
    assert folder.of(plan(endpoint_name="other")) == []
    assert RecordFolder(tmp_path, "http://127.0.0.1:8701").of(plan()) == []


def test_a_rollout_keeps_its_id_until_its_first_line(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, "http://127.0.0.1:8700")
    file = folder.new(plan())

    assert folder.new(plan()).path == file.path
    file.append(begun())
    assert folder.new(plan()).path != file.path


def test_one_endpoint_is_driven_by_one_process_at_a_time(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, "http://127.0.0.1:8700")

    with folder.lock(plan()) as first, folder.lock(plan()) as second:
        assert (first, second) == (True, False)
        with folder.lock(plan(endpoint_name="other")) as third:
            assert third
    with folder.lock(plan()) as again:
        assert again


@pytest.mark.parametrize("began_by", ["name", "id"])
def test_an_endpoint_is_one_whether_a_plan_says_its_name_or_its_id(
    tmp_path: Path, began_by: str
) -> None:
    folder = RecordFolder(tmp_path, "http://127.0.0.1:8700")
    by_name, by_id = plan(), plan(endpoint_id="cep_shop", endpoint_name=None)
    first, second = (by_name, by_id) if began_by == "name" else (by_id, by_name)

    with folder.lock(first) as first_is_free:
        assert first_is_free
        fact = Begun("r", "cep_shop", first.model_dump(mode="json"), first.digest(), ())
        folder.new(first).append(replace(fact, endpoint_name="shop"))
        with folder.lock(second) as second_is_free:
            assert not second_is_free
        with folder.lock(plan(endpoint_id="cep_other", endpoint_name=None)) as other_is_free:
            assert other_is_free
    with folder.lock(second) as second_is_free:
        assert second_is_free


def damage(path: Path, line: int) -> None:
    lines = path.read_text().splitlines()
    lines[line] = lines[line][: len(lines[line]) // 2]
    path.write_text("\n".join(lines) + "\n")


def test_a_damaged_record_is_set_aside_and_blocks_its_own_endpoint_alone(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, "http://127.0.0.1:8700")
    file = folder.new(plan())
    file.append(begun(), SplitIntended(5, "first step"), SplitConfirmed(5))
    other = folder.new(plan(endpoint_name="other"))
    other.append(begun(endpoint_name="other"))
    damage(file.path, 1)

    (damaged,) = folder.damaged()

    assert damaged.path == file.path
    assert folder.of(plan()) == []
    assert [one.path for one in folder.of(plan(endpoint_name="other"))] == [other.path]
    assert damaged.blocks(plan())
    assert damaged.blocks(plan(endpoint_id="cep_shop", endpoint_name=None))
    assert damaged.blocks(plan(endpoint_name="renamed"), "cep_shop")
    assert not damaged.blocks(plan(endpoint_name="other"), "cep_other")
    assert folder.new(plan()).path != file.path, "the next record must not be written behind it"


@pytest.mark.parametrize("content", [b"\xff\xfe\n{}\n", b"[]\nnull\n", b'{"kind":"resumed"}\n'])
def test_a_record_of_which_nothing_can_be_read_blocks_nobody(
    tmp_path: Path, content: bytes
) -> None:
    folder = RecordFolder(tmp_path, "http://127.0.0.1:8700")
    folder.path.mkdir()
    (folder.path / "rollout-1.jsonl").write_bytes(content)

    (damaged,) = folder.damaged()

    assert folder.of(plan()) == []
    assert not damaged.blocks(plan(), "cep_shop")


def test_a_damaged_record_that_says_that_it_ended_blocks_nobody(tmp_path: Path) -> None:
    folder = RecordFolder(tmp_path, "http://127.0.0.1:8700")
    file = folder.new(plan())
    file.append(begun(), SplitIntended(5, "first step"), Ended("rolled_back", "error_rate"))
    damage(file.path, 1)

    (damaged,) = folder.damaged()

    assert not damaged.blocks(plan())


# Two lines of a release, which have no hash.
OLD_RELEASE = (
    b'{"kind": "begun", "at": "2026-01-05T08:00:00+00:00", "run_key": "k", "endpoint_id": null,'
    b' "endpoint_name": "shop"}\n'
    b'{"kind": "job", "at": "2026-01-05T08:00:01+00:00", "id": "ft_1", "content": ["x"]}\n'
)


def test_records_of_earlier_runs_are_read_and_stay_byte_for_byte(tmp_path: Path) -> None:
    facts = (begun(), SplitIntended(5, "first step"), SplitConfirmed(5))
    rollout, release = tmp_path / "rollout-1.jsonl", tmp_path / "release-1.jsonl"
    written = "".join(f"{line}\n" for line in lines_of(facts)).encode()
    rollout.write_bytes(written)
    release.write_bytes(OLD_RELEASE)

    file, record = RecordFile(rollout), ReleaseRecord(release)
    assert file.record.facts == facts
    assert (record.damage, record.made("job")) == ("", "ft_1")
    assert (rollout.read_bytes(), release.read_bytes()) == (written, OLD_RELEASE)

    file.append(Ended("aborted", "error"))
    record.add("ended", datetime(2026, 1, 6, tzinfo=UTC), outcome="aborted", reason="error")
    assert rollout.read_bytes().startswith(written)
    assert release.read_bytes().startswith(OLD_RELEASE)
