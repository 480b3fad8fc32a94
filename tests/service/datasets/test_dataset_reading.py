"""The reader judges every line of any file as a simple reference implementation does."""

import io
import json
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.service.in_process import jsonl
from tuneship.contract.lines.dataset_lines import Message, parse_line
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.reading_lines import BYTE_ORDER_MARK
from tuneship.service.catalogues.base_models import Catalogue
from tuneship.service.datasets.reading import (
    COMPRESSED,
    DatasetReading,
    Plan,
    read_dataset,
)

BASE = Catalogue().default
TEXT = st.text(max_size=12)
GOOD = st.fixed_dictionaries({"instruction": TEXT, "response": TEXT}, optional={"input": TEXT})
LINES = st.one_of(
    GOOD.map(lambda line: json.dumps(line).encode()),
    GOOD.map(lambda line: json.dumps(line, ensure_ascii=False).encode()),
    st.sampled_from(
        [
            b"",
            b" ",
            b"{}",
            b"[]",
            b"\xff",
            b'{"messages":[]}',
            b'{"instruction":"a","instruction":"b","response":"c"}',
            b'{"instruction":"a","response":NaN}',
            b'{"prompt":"a","completion":"b"}',
        ]
    ),
    st.binary(max_size=8).map(lambda data: data.replace(b"\n", b"")),
)
ENDS = st.sampled_from([b"\n", b"\r\n"])


def read(data: bytes, base: Any = None) -> DatasetReading:
    return read_dataset(io.BytesIO(data), len(data), Plan("instruction", base, lambda: False))


def oracle(data: bytes) -> tuple[list[list[Message]], list[tuple[int, str]]]:
    """The examples of a file, and its errors by line."""
    examples: list[list[Message]] = []
    errors: list[tuple[int, str]] = []
    for number, line in enumerate(data.removeprefix(BYTE_ORDER_MARK).split(b"\n"), start=1):
        if line.strip():
            try:
                examples.append(parse_line(line, "instruction"))
            except ExampleProblem as problem:
                errors.append((number, problem.code))
    return examples, errors


@settings(max_examples=300)
@given(
    lines=st.lists(st.tuples(LINES, ENDS), max_size=12),
    start=st.sampled_from([b"", BYTE_ORDER_MARK]),
    has_last_end=st.booleans(),
)
def test_every_line_has_the_verdict_of_the_oracle(
    lines: list[tuple[bytes, bytes]], start: bytes, *, has_last_end: bool
) -> None:
    data = start + b"".join(line + end for line, end in lines)
    data = data if has_last_end else data.rstrip(b"\r\n")
    assume(not data.startswith(COMPRESSED))
    examples, errors = oracle(data)
    reading = read(data)
    if examples or errors:
        assert [(one.line, one.code) for one in reading.errors] == errors
    else:
        assert [(one.line, one.code) for one in reading.errors] == [(None, "no_examples")]
    assert reading.num_examples == len(examples)
    different = {tuple((turn["role"], turn["content"]) for turn in one) for one in examples}
    assert reading.codes["duplicate_example"] == len(examples) - len(different)


@settings(max_examples=40)
@given(lines=st.lists(GOOD, max_size=300))
def test_tokens_are_summed_by_role_whatever_repeats(lines: list[dict[str, str]]) -> None:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    examples, _ = oracle(data)
    tokenizer: Any = BASE.tokenizer
    counts = {"user": 0, "assistant": 0}
    for turn in (turn for one in examples for turn in one):
        counts[turn["role"]] += len(tokenizer.encode(turn["content"], add_special_tokens=False).ids)
    reading = read(data, BASE)
    assert (reading.prompt_tokens, reading.response_tokens) == tuple(counts.values())


def test_the_lines_beyond_the_most_are_not_read() -> None:
    data = jsonl(*({"instruction": "a", "response": str(number)} for number in range(4)), [])
    plan = Plan("instruction", None, lambda: False, lines_limit=3)
    found = read_dataset(io.BytesIO(data), len(data), plan)
    assert [(one.line, one.code) for one in found.errors] == [(None, "too_many_lines")]
    assert found.errors[0].message == "has over 3 lines"
    assert (found.error_count, found.num_examples) == (1, 3)
