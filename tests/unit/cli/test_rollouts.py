"""A record is decided again from itself alone, and whatever was changed in it is named."""

import json
import random
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from flows.rollout.record_file import Damaged, RecordFile, read_record
from tests.unit.gates.rollouts import Rollout, Steady, plan_with
from tuneship.cli.commands.rollouts import DIFFERENT, app
from tuneship.gates.record import Ended, Look, Verdict, linked, to_line


def replay(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["replay", *map(str, arguments)])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rollout = Rollout(plan_with(), Steady(errors=lambda _, now: 0.2 if now > 5 else 0.003)).begin()
    assert rollout.run().verdict is Verdict.ROLLBACK
    file = RecordFile(tmp_path_factory.mktemp("records") / "service" / "rollout-1.jsonl")
    for fact in rollout.record.facts:
        file.append(fact)
    file.append_if_possible(Ended("rolled_back", "error_rate"))
    return file.path


def test_a_record_is_replayed_by_its_file_and_by_its_id(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = sum(isinstance(fact, Look) for fact in RecordFile(recorded).record.facts)
    words = f"rollout-1: {looks} checks decide as they are recorded; rolled_back (error_rate)\n"
    monkeypatch.setenv("TUNESHIP_RECORDS", str(recorded.parents[1]))
    for name in (recorded, "rollout-1"):
        result = replay(name)
        assert (result.exit_code, result.output) == (0, words)
    assert replay("rollout-2").exit_code == 1
    assert replay(recorded.parent / "none.jsonl").exit_code == 1


def test_a_changed_byte_is_named_with_its_line(recorded: Path, tmp_path: Path) -> None:
    lines = recorded.read_text().splitlines()
    dice = random.Random(1)  # noqa: S311 - no secret
    for number, line in enumerate(lines):
        for at in [0, len(line) - 1, *(dice.randrange(len(line)) for _ in range(8))]:
            sign = "#" if line[at] != "#" else "$"
            changed = [*lines[:number], line[:at] + sign + line[at + 1 :], *lines[number + 1 :]]
            path = tmp_path / "changed.jsonl"
            path.write_text("\n".join(changed) + "\n")
            found = read_record(path)
            if number == len(lines) - 1 and not isinstance(found, Damaged):
                # A last line that is no JSON is one in which the writer was killed.
                assert len(found.record.facts) == len(lines) - 1
                continue
            assert isinstance(found, Damaged), (number, at)
            names = {f"line {number + 1}", f"line {number + 2}"}
            assert any(f"{name}," in f"{found.why}," for name in names), found.why
            assert (result := replay(path)).exit_code == DIFFERENT
            assert any(name in result.output for name in names)


def test_lines_that_are_gone_or_exchanged_are_named(recorded: Path, tmp_path: Path) -> None:
    lines = recorded.read_text().splitlines()
    path = tmp_path / "changed.jsonl"
    for changed in ([*lines[:2], *lines[3:]], [*lines[:3], lines[4], lines[3], *lines[5:]]):
        path.write_text("\n".join(changed) + "\n")
        assert isinstance(read_record(path), Damaged)
        assert replay(path).exit_code == DIFFERENT


def test_a_look_that_was_written_again_with_its_hashes_decides_otherwise(
    recorded: Path, tmp_path: Path
) -> None:
    last, texts = "", list[str]()
    for fact in RecordFile(recorded).record.facts:
        line = json.loads(to_line(fact))
        if line["kind"] == "look" and line["number"] == 3:
            line["gates"][0]["candidate_bad"] += 1
        last = linked(last, json.dumps(line))
        texts.append(last)
    path = tmp_path / "changed.jsonl"
    path.write_text("\n".join(texts) + "\n")
    result = replay(path)
    assert result.exit_code == DIFFERENT
    assert "look 3.gates.0.candidate_bad: recorded 1, decided 0" in result.output
