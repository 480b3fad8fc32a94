"""Rows are read from CSV, Parquet, frames, datasets and iterables as one would expect, and refused with their place."""

import csv
import datetime
import io
import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneship.client import SourceError, parse_columns, records
from tuneship.contract.declaring.verbs import Columns
from tuneship.contract.lines.dataset_lines import parse_example
from tuneship.contract.lines.tool_lines import tools_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of the library's own imports
    import datasets

SECRET = "the patient's own words"
ROWS = [
    {"instruction": "Fracture of rib", "response": "Injury"},
    {"instruction": "Senile cataract, both eyes", "response": 'of the "eye"\nand adnexa'},
]
TURNS = [
    {"role": "user", "content": "Wohin mit Zöliakie?"},
    {"role": "assistant", "content": "zu K90"},
]
CHAT = [{"messages": TURNS}, {"messages": [*TURNS, *TURNS]}]
MAPPED = {"instruction": "question", "response": "answer text"}
MakeSource = Callable[[Path, list[dict[str, Any]]], Any]


def csv_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.csv"
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, list(rows[0]))
        writer.writeheader()
        for row in rows:
            cells = {k: v if isinstance(v, str) else json.dumps(v) for k, v in row.items()}
            writer.writerow({k: "" if row[k] is None else cells[k] for k in row})
    return file


def parquet_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    return folder / "rows.parquet"


def json_lines_file(folder: Path, rows: list[dict[str, Any]]) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n\n" for row in rows))
    return file


SOURCES: dict[str, MakeSource] = {
    "csv": csv_file,
    "parquet": parquet_file,
    "frame": lambda _, rows: pd.DataFrame(rows),
    "dataset": lambda _, rows: datasets.Dataset.from_list(rows),
    "streamed dataset": lambda _, rows: datasets.Dataset.from_list(rows).to_iterable_dataset(),
    "list": lambda _, rows: rows,
    "generator": lambda _, rows: (row for row in rows),
    "json lines": json_lines_file,
    "path as text": lambda folder, rows: str(json_lines_file(folder, rows)),
    "open file": lambda folder, rows: io.BytesIO(json_lines_file(folder, rows).read_bytes()),
}
# Where a table has columns; the others have names in each row.
TABLES = ["csv", "parquet", "frame", "dataset", "streamed dataset"]


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda rows: SOURCES[request.param](tmp_path, rows)


def refusal(source: Any, columns: Columns | None = None) -> str:
    with pytest.raises(SourceError) as refused:
        list(records(source, columns))
    assert SECRET not in str(refused.value)
    assert not refused.value.retryable
    return str(refused.value)


def written(folder: Path, content: str | bytes, name: str = "notes.csv") -> Path:
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("rows", [ROWS, CHAT], ids=["instruction", "conversation"])
def test_every_source_gives_the_same_rows(
    source: Callable[..., Any], rows: list[dict[str, Any]]
) -> None:
    assert list(records(source(rows))) == rows


def test_columns_give_other_names_and_leave_the_rest_out(source: Callable[..., Any]) -> None:
    rows = [
        {"id": "7", "question": row["instruction"], "answer text": row["response"], "name": SECRET}
        for row in ROWS
    ]
    assert list(records(source(rows), MAPPED)) == ROWS


def test_a_column_that_is_nowhere_is_named(source: Callable[..., Any]) -> None:
    message = refusal(source(ROWS), {"instruction": "instruction", "response": "answer"})
    assert "no" in message
    assert message.endswith("column answer")


def test_a_missing_value_is_left_out(source: Callable[..., Any]) -> None:
    rows = [{**ROWS[0], "system": "be brief"}, {**ROWS[1], "system": None}]
    found = list(records(source(rows), {name: name for name in rows[0]}))
    assert found == [rows[0], ROWS[1]]


@pytest.mark.parametrize("kind", [*TABLES, "list", "generator"])
def test_a_column_that_is_no_field_is_refused_by_its_place(kind: str, tmp_path: Path) -> None:
    rows = [{**ROWS[0], SECRET: SECRET}]
    message = refusal(SOURCES[kind](tmp_path, rows))
    assert "column 3 is no field of a dataset; say with columns which ones to take" in message


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_without_the_fields_is_refused(kind: str, tmp_path: Path) -> None:
    message = refusal(SOURCES[kind](tmp_path, [{"instruction": "a", SECRET: SECRET}]))
    assert "there is no column response; say with columns which ones to take" in message


@pytest.mark.parametrize("kind", [*TABLES, "list"])
def test_two_columns_for_one_field_are_refused(kind: str, tmp_path: Path) -> None:
    message = refusal(SOURCES[kind](tmp_path, [{**ROWS[0], "prompt": "another"}]))
    assert "several columns are read as instruction" in message


# CSV.


def test_csv_with_a_byte_order_mark_carriage_returns_and_blank_lines(tmp_path: Path) -> None:
    text = '\ufeffinstruction , response\r\n"a ""b""\r\nc",d\r\n\r\n"e, f",\r\n'
    found = list(records(written(tmp_path, text)))
    assert found == [{"instruction": 'a "b"\r\nc', "response": "d"}, {"instruction": "e, f"}]


@pytest.mark.parametrize(
    "text",
    [
        "sep=,\r\ninstruction,response\r\na,b\r\nc,\r\n",
        '"sep=,"\ninstruction,response\na,b\nc,\n',
        "instruction,response,,\na,b,,\nc,,\n,,,\n",
        "instruction,response\na,b,,\nc,,,\n",
        "sep=,,,\ninstruction,response, ,\na,b\nc,\n",
    ],
)
def test_csv_as_spreadsheets_write_it(text: str, tmp_path: Path) -> None:
    rows = [{"instruction": "a", "response": "b"}, {"instruction": "c"}]
    assert list(records(written(tmp_path, text))) == rows


@pytest.mark.parametrize("mark", [",", ";", "\t"])
@pytest.mark.parametrize("before", ["", "sep={}\n"])
def test_the_cells_of_a_csv_file_are_separated_as_in_its_first_line(
    mark: str, before: str, tmp_path: Path
) -> None:
    text = f'{before.format(mark)}instruction{mark}response\n"a, b; c"{mark}d\n'
    assert list(records(written(tmp_path, text))) == [{"instruction": "a, b; c", "response": "d"}]


def test_a_comma_in_a_column_s_name_does_not_separate_cells(tmp_path: Path) -> None:
    text = "instruction;response;notes, private\na;b;c, d\n"
    (read,) = pd.read_csv(io.StringIO(text), sep=";").to_dict("records")
    columns = {"instruction": "instruction", "response": "response"}
    (found,) = records(written(tmp_path, text), columns)
    assert found == {name: read[name] for name in columns}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "notes.csv: is empty; its first line must name the columns"),
        ("\n", "notes.csv, line 1 (the names of the columns): there is no column instruction"),
        (f"{SECRET},b\nc,d\n", "line 1 (the names of the columns): there is no column instruction"),
        ("instruction|response\na|b\n", "notes.csv, line 1: cells must be separated by commas"),
        (f"instruction,response\na,b,{SECRET}\n", "line 2: has 3 cells, and the first line 2"),
        (f'instruction,response\n"a\nb",c\n{SECRET}\n', "line 4: has 1 cell, and the first"),
        (f'instruction,response\na,b\n"{SECRET},\nd\n', "line 3: a double quote is missing"),
        (f'instruction,response\n"a" {SECRET},b\n', "line 2: a double quote is missing"),
        (f"instruction,response\ra,{SECRET}\r", "line 1: has a carriage return that is neither"),
        (
            "instruction,response\na,b\nc,\xe9\n".encode("latin-1"),
            "notes.csv, line 3: is not UTF-8",
        ),
        ("instruction,response\n".encode("utf-16"), "notes.csv, line 1: is not UTF-8"),
        (f'messages\n"{SECRET}"\n', "notes.csv, line 2, messages: is not valid JSON"),
        ("instruction,instruction,response\n", "several columns are read as instruction"),
        ("instruction,response,input,input\n", "there are several columns input"),
        ("sep=;\ninstruction;response\na;b;c\n", "line 3: has 3 cells, and the first line 2"),
        (f"instruction,response,,\na,b,,{SECRET}\n", "line 2: has 4 cells, and the first line 2"),
        (f"instruction,,response\na,{SECRET},b\n", "column 2 is no field"),
    ],
)
def test_bad_csv_is_refused_with_its_line(
    content: str | bytes, message: str, tmp_path: Path
) -> None:
    assert message in refusal(written(tmp_path, content))


def test_a_field_may_be_long_and_not_endless(tmp_path: Path) -> None:
    long = "x" * (1 << 20)
    assert list(records(written(tmp_path, f"instruction,response\n{long},b\n"))) == [
        {"instruction": long, "response": "b"}
    ]
    lines = "instruction,response\na,b\n" + '"c\n' + ("y" * 999 + "\n") * 9000
    assert "line 3: a field is longer than 8 MiB" in refusal(written(tmp_path, lines))
    message = refusal(written(tmp_path, "instruction,response\n" + "z" * (9 << 20)))
    assert message.endswith("notes.csv, line 2: is longer than 8 MiB")


@given(
    st.lists(
        st.fixed_dictionaries(
            {"instruction": st.text(min_size=1), "response": st.text(min_size=1)}
        ),
        min_size=1,
    )
)
def test_any_text_survives_csv(rows: list[dict[str, str]]) -> None:
    with io.StringIO(newline="") as text:
        writer = csv.DictWriter(text, ["instruction", "response"])
        writer.writeheader()
        writer.writerows(rows)
        content = text.getvalue().encode()
    # The reader of open CSV files: a property runs hundreds of times, and files are slow.
    from tuneship.client.records import READERS

    assert list(READERS[".csv"](io.BytesIO(content), "rows.csv", None)) == rows


# Parquet.


def test_a_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    message = "rows.parquet: cannot be read as Parquet"
    assert refusal(written(tmp_path, SECRET, "rows.parquet")).endswith(message)
    whole = parquet_file(tmp_path, ROWS * 500).read_bytes()
    assert refusal(written(tmp_path, whole[:200], "rows.parquet")).endswith(message)
    damaged = whole[:30] + bytes(60) + whole[90:]
    assert "cannot be read as Parquet" in refusal(written(tmp_path, damaged, "rows.parquet"))


def test_parquet_without_pyarrow_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = parquet_file(tmp_path, ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refusal(file).endswith("pip install pyarrow")


def test_fields_that_only_some_objects_have_come_out_of_parquet_as_missing(tmp_path: Path) -> None:
    turns = [TURNS[0], {**TURNS[1], "weight": 1}]
    found = list(records(parquet_file(tmp_path, [{"messages": turns}])))
    assert found[0]["messages"][0] == {**TURNS[0], "weight": None}


def function(name: str, parameters: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def talk(name: str, arguments: Mapping[str, Any], tool: dict[str, Any]) -> dict[str, Any]:
    """A conversation with one call."""
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "c1"},
        {"role": "assistant", "content": "c"},
    ]
    return {"messages": turns, "tools": [tool], "metadata": {name: 1}}


NESTED = {"type": "object", "properties": {"at": {"type": "array", "items": {"type": "number"}}}}
TALKS = [
    talk(
        "weather",
        {"city": "Rome"},
        function("weather", {"city": {"type": "string", "enum": ["Rome"]}}, required=["city"]),
    ),
    talk("add", {"a": 1, "b": {"at": [2.5]}}, function("add", {"a": {"type": "integer"}, "b": NESTED})),
    talk("list", {"all": [{"x": 1}, {"y": None, "z": [None]}]}, function("list", {})),
]  # fmt: skip
# Arrow cannot tell this null from a key that is missing.
WITHOUT_NULLS = [*TALKS[:2], talk("list", {"all": [{"x": 1}, {"z": [None]}]}, function("list", {}))]
IN_ARROW: dict[str, MakeSource] = {
    name: SOURCES[name] for name in ("parquet", "dataset", "streamed dataset")
} | {
    "table": lambda _, rows: pa.Table.from_pylist(rows),
    "frame of Parquet": lambda folder, rows: pd.read_parquet(parquet_file(folder, rows)),
}


def examples(rows: list[dict[str, Any]]) -> list[Any]:
    return [(parse_example(row, "conversation"), tools_of(row)) for row in rows]


@pytest.mark.parametrize("kind", IN_ARROW)
def test_functions_of_other_rows_leave_no_nulls(kind: str, tmp_path: Path) -> None:
    found = list(records(IN_ARROW[kind](tmp_path, TALKS)))
    assert examples(found) == examples(WITHOUT_NULLS)
    assert [row["metadata"] for row in found] == [row["metadata"] for row in TALKS]


def test_rows_that_arrow_has_unified_are_known_by_their_functions() -> None:
    """As JSON Lines and as dictionaries, too, where other nulls are kept."""
    rows = pa.Table.from_pylist(TALKS).to_pylist()
    assert examples(rows) == examples(WITHOUT_NULLS)
    assert examples(list(records(rows))) == examples(WITHOUT_NULLS)
    assert examples(list(records(TALKS))) == examples(TALKS)


@pytest.mark.parametrize("kind", ["csv", *IN_ARROW])
def test_nulls_and_long_numbers_in_json_text_are_kept(kind: str, tmp_path: Path) -> None:
    arguments = {"a": None, "b": 2**64 + 1, "c": 10**30}
    row = talk("add", arguments, function("add", {"a": {"type": "integer"}}))
    sources = SOURCES | IN_ARROW
    texts = {name: json.dumps(value) for name, value in row.items()}
    assert list(records(sources[kind](tmp_path, [texts]))) == [row]


@pytest.mark.parametrize("kind", ["dataset", "table", "Parquet"])
def test_json_columns_of_hugging_face_keep_their_nulls(kind: str, tmp_path: Path) -> None:
    mixed = talk("find", {"x": "text", "y": [{"z": None}], "w": None}, function("find", {}))
    number = talk("find", {"x": 1}, function("find", {"x": {"type": "integer"}}))
    data = datasets.Dataset.from_list([mixed, number], on_mixed_types="use_json")
    assert "Json" in str(data.features)
    data.to_parquet(tmp_path / "rows.parquet")
    table = pq.read_table(tmp_path / "rows.parquet")
    source = {"dataset": data, "table": table, "Parquet": tmp_path / "rows.parquet"}[kind]
    found = list(records(source))
    assert [turns for turns, _ in examples(found)] == [
        turns for turns, _ in examples([mixed, number])
    ]


def test_a_map_of_arrow_is_an_object(tmp_path: Path) -> None:
    kind = pa.map_(pa.string(), pa.int64())
    cells = [[("a", 1)], [("a", 1), ("a", 2)]]
    for number, cell in enumerate(cells):
        metadata = pa.array([cell], kind)
        table = pa.table({"instruction": ["a"], "response": ["b"], "metadata": metadata})
        pq.write_table(table, tmp_path / f"{number}.parquet")
    assert next(records(tmp_path / "0.parquet"))["metadata"] == {"a": 1}
    assert refusal(tmp_path / "1.parquet").endswith("a map holds one key twice")


# Frames and values.


@pytest.mark.parametrize("missing", [None, math.nan, pd.NA, pd.NaT, np.float32("nan")])
def test_values_that_pandas_calls_missing_are_missing(missing: Any) -> None:
    frame = pd.DataFrame({"instruction": ["a", "b"], "response": ["c", missing]}, dtype=object)
    expected = [{"instruction": "a", "response": "c"}, {"instruction": "b"}]
    assert list(records(frame)) == expected
    assert list(records(frame.to_dict("records"))) == expected
    assert list(records(frame.astype("string"))) == expected


def test_a_frame_with_an_index_of_its_own_and_numbers() -> None:
    frame = pd.DataFrame({"instruction": ["a", "b"], "response": [1, 2]}, index=[5, 5])
    assert [json.dumps(row["response"]) for row in records(frame)] == ["1", "2"]


def test_a_frame_with_two_columns_of_one_name_is_refused() -> None:
    frame = pd.DataFrame([["a", "b", "c"]], columns=["instruction", "response", "response"])
    assert "several columns" in refusal(frame)


def test_arrays_of_numpy_become_lists(tmp_path: Path) -> None:
    frame = pd.DataFrame(CHAT)
    frame["messages"] = [np.array(turns, dtype=object) for turns in frame["messages"]]
    assert list(records(frame)) == CHAT
    frame["messages"] = [json.dumps(row["messages"]) for row in CHAT]
    assert list(records(frame)) == CHAT


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (math.inf, "is infinite"),
        ("\ud800", "holds half of a surrogate pair"),
        ({1: SECRET}, "has an object whose keys are not all texts"),
        (datetime.date(2026, 1, 1), "is of type date, which JSON does not have"),
        (SECRET.encode(), "is of type bytes, which JSON does not have"),
        (nested(100_000), "is nested too deeply"),
    ],
)
def test_a_value_that_json_does_not_have_is_refused(value: Any, message: str) -> None:
    rows = [ROWS[0], {"instruction": SECRET, "response": value}]
    assert refusal(rows) == f"row 2, response: {message}"


# Datasets, rows and what is neither.


def test_a_dataset_in_another_format_is_read_in_its_own() -> None:
    formatted = datasets.Dataset.from_list(ROWS).with_format("numpy")
    assert list(records(formatted)) == ROWS


def test_a_dataset_dict_asks_for_a_split() -> None:
    both = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})
    assert "choose one split" in refusal(both)


@pytest.mark.parametrize("source", [7, None, b"text", bytearray(b"x")])
def test_records_without_rows_are_refused(source: Any) -> None:
    expected = f"the source is of type {type(source).__name__}, and must be a path, an open file,"
    assert refusal(source).startswith(expected)


def test_rows_that_are_no_mappings_are_refused() -> None:
    assert refusal([ROWS[0], SECRET]) == "row 2: is no mapping from fields to values"


def test_a_text_file_is_refused(tmp_path: Path) -> None:
    with json_lines_file(tmp_path, ROWS).open() as opened:
        assert "binary" in refusal(opened)


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.csv") == f"{tmp_path / 'none.csv'}: no such file"
    (tmp_path / "folder.csv").mkdir()
    assert "folder.csv: cannot be read (Is a directory)" in refusal(tmp_path / "folder.csv")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f'{{"instruction": "{SECRET}"', "is not valid JSON"),
        (f'["{SECRET}"]', "must be a JSON object"),
        ('{"a": 1, "a": 2}', "holds one key twice"),
    ],
)
def test_a_bad_line_of_json_is_refused(line: str, message: str, tmp_path: Path) -> None:
    file = written(tmp_path, f"{json.dumps(ROWS[0])}\n{line}\n", "rows.jsonl")
    assert refusal(file) == f"{file}, line 2: {message}"
    assert refusal(file, {"instruction": "instruction"}) == f"{file}, line 2: {message}"


def test_rows_are_read_only_as_they_are_needed() -> None:
    taken = 0

    def endless() -> Iterator[Mapping[str, Any]]:
        nonlocal taken
        while True:
            taken += 1
            yield ROWS[0]

    found = records(endless())
    assert [next(found) for _ in range(3)] == [ROWS[0]] * 3
    assert taken == 3


# The text form of `columns`.


def test_columns_are_read_from_text() -> None:
    assert parse_columns("instruction=question, response = a=b") == {
        "instruction": "question",
        "response": "a=b",
    }
    assert parse_columns('"instruction=what, and why",response=so') == {
        "instruction": "what, and why",
        "response": "so",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "columns: name at least one field with its column"),
        ("instruction", "columns: part 1 must be of the form field=column"),
        ("instruction=a,=b", "columns: part 2 must be of the form field=column"),
        ("instruction=a,response=", "columns: part 2 must be of the form field=column"),
        ("instruction=a,instruction=b", "columns: part 2 gives instruction a second time"),
        (
            f"instruction=a,{SECRET}=b",
            "columns: part 2 names no field; the fields are instruction,",
        ),
        ('"instruction=a', "columns: a double quote is not closed"),
    ],
)
def test_bad_columns_are_refused_by_their_part(text: str, message: str) -> None:
    with pytest.raises(SourceError) as refused:
        parse_columns(text)
    assert str(refused.value).startswith(message)
    assert SECRET not in str(refused.value)


def test_bad_columns_of_a_call_are_refused_at_once() -> None:
    for columns in ({}, {"weight": "w"}):
        with pytest.raises(SourceError, match="columns: "):
            records(ROWS, columns)
