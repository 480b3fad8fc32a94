"""The pipeline reads the user's own files."""

import json
from pathlib import Path

import pytest

from flows.release.local_files import EvaluationExample, content_sha256, overlap, questions
from flows.shared.errors import BadInput


def write(file: Path, rows: list[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_questions_are_the_first_rows_with_one_turn_each(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"instruction": "a", "response": " 1 "},
        {"instruction": "b", "response": "2", "system": "a system turn has no prompt form"},
        {"prompt": "c", "input": "more", "completion": "3"},
        {"instruction": "d", "response": "4"},
    ]
    file = write(tmp_path / "v.jsonl", rows)
    assert questions(file, "instruction", 2) == [
        EvaluationExample("a", "1"),
        EvaluationExample("c\n\nmore", "3"),
    ]


def test_overlap_counts_validation_rows_that_are_trained_on(tmp_path: Path) -> None:
    held_out = write(
        tmp_path / "v.jsonl",
        [{"instruction": "a", "response": "1"}, {"instruction": "b", "response": "2"}],
    )
    trained = write(
        tmp_path / "t.jsonl",
        [
            {"response": "1", "instruction": "a"},  # the same row, written in another order
            {"instruction": "a", "response": "1"},
            {"instruction": "b", "response": "another answer"},
        ],
    )
    marked = tmp_path / "m.jsonl"
    marked.write_bytes(b"\xef\xbb\xbf" + trained.read_bytes().splitlines()[0])
    assert overlap(held_out, [trained], "instruction") == 1
    assert overlap(held_out, [marked], "instruction") == 1


def test_the_digest_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"abc")
    assert content_sha256(file).startswith("ba7816bf8f01cfea414140de5dae2223")


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        content_sha256(tmp_path / "none")
