"""Tests of what the one JSON parser refuses, and of how little a refusal costs."""

import json
import time
from collections.abc import Callable

import pytest

from tuneship.contract.lines import strict_json
from tuneship.contract.lines.strict_json import MAXIMUM_DEPTH, MAXIMUM_VALUES, JsonRefused

MEBIBYTE = 1 << 20


def fault_of(data: bytes, **options: int) -> str:
    with pytest.raises(JsonRefused) as refused:
        strict_json.parse(data, **options)
    return f"{refused.value.fault}: {refused.value.message}"


def filled(piece: bytes, joint: bytes = b",") -> bytes:
    """Fill a mebibyte with one piece again and again, as a list in an object."""
    number = (MEBIBYTE - 10) // (len(piece) + len(joint))
    return b'{"a":[' + joint.join([piece] * number) + b"]}"


BOMBS = {
    "empty lists": filled(b"[]"),
    "objects": filled(b'{"a":1}'),
    "numbers": filled(b"1"),
    "texts": filled(b'""'),
    "texts of commas": filled(b'",,"'),
    "texts of quotes": filled(b'"\\""'),
}


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_body_of_more_values_than_any_request_has_is_refused_for_little(bomb: bytes) -> None:
    """A refusal takes less than 8 times the processor time of a text of this length. It used to take 50 to 180."""
    text = json.dumps({"a": "x" * MEBIBYTE}).encode()

    def refuse() -> None:
        assert fault_of(bomb) == f"invalid_json: holds more than {MAXIMUM_VALUES} values"

    assert _processor_time(refuse) < 8 * _processor_time(lambda: strict_json.parse(text))


def _processor_time(work: Callable[[], object]) -> float:
    times: list[float] = []
    for _ in range(5):
        started = time.thread_time()
        work()
        times.append(time.thread_time() - started)
    return min(times)


def test_values_are_counted_exactly_where_there_are_many() -> None:
    """The list, its object and the elements are counted. Characters within a text are not, whatever they are."""
    for piece in ("1", '",,,,[[[{{{"', r'"\\\",[\\"', "[]", '{"a,[":1}'):
        inner = 2 if piece.startswith("{") else 1
        fitting = (MAXIMUM_VALUES - 2) // inner
        body = '{"a":[' + ",".join([piece] * (fitting // 2)) + "]}"
        assert strict_json.parse(body.encode()) == json.loads(body)
    assert strict_json.parse(b"[" + b",".join([b"1"] * MAXIMUM_VALUES) + b"]")
    assert fault_of(b"[" + b",".join([b"1"] * (MAXIMUM_VALUES + 1)) + b"]").startswith(
        "invalid_json"
    )
    assert strict_json.parse(b"[" + b",".join([b"1"] * (MAXIMUM_VALUES + 1)) + b"]", 1 << 20)


def test_a_long_text_may_hold_any_number_of_marks() -> None:
    text = 'a table, with "quotes", [brackets] and \\ slashes \\" ' * 10_000
    assert strict_json.parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        pytest.param(r'{"a":"\u0000"}', "nul", id="U+0000 in a text"),
        pytest.param(r'{"\u0000":1}', "nul", id="U+0000 in a name"),
        pytest.param(r'{"a":["\ud800"]}', "invalid_json", id="half a pair"),
        pytest.param(r'{"a":{"\udc00":1}}', "invalid_json", id="half a pair in a name"),
        pytest.param('{"a":"\x00"}', "invalid_json", id="U+0000 as it is"),
        pytest.param(r'["\ud800","\u0000"]', "invalid_json", id="the first of two faults"),
        pytest.param(r'["\u0000","\ud800"]', "nul", id="and the other way round"),
        pytest.param('{"a":1,"a":1}', "duplicate_key", id="a name twice"),
        pytest.param("[" * 33 + "]" * 33, "invalid_json", id="33 levels"),
        pytest.param("[" * (1 << 20), "invalid_json", id="a million levels"),
        pytest.param('{"a":[1,1e999]}', "invalid_json", id="no double"),
    ],
)
def test_json_that_parsers_disagree_about_is_refused(document: str, fault: str) -> None:
    assert fault_of(document.encode()).partition(":")[0] == fault


def test_levels_are_counted_whatever_stands_beside_them() -> None:
    lists = "[" * (MAXIMUM_DEPTH - 1) + "]" * (MAXIMUM_DEPTH - 1)
    assert strict_json.parse(f"[{lists}, {lists}, 1, {{}}]".encode())
    assert "nested deeper" in fault_of(f"[1, {{}}, {lists}, [{lists}]]".encode())
    assert strict_json.parse(rb'{"a":"\ud83d\ude00 \u00e9"}') == {"a": "😀 é"}
