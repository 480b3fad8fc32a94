"""Rows of a dataset from common sources: CSV, Parquet, pandas frames, Hugging Face datasets, iterables of mappings.

Each source has a function that yields its rows as JSON objects and holds a few of them at a time. A missing value (an
empty cell of a CSV file, NaN, null) is left out of its row, and in tables out of the objects of a row, too. Errors name
the place and never a cell, nor the name of a column that the caller did not give: without a header, the first line of a
file is data.
"""

import csv
import math
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, cast

from tuneship.contract.common import count
from tuneship.contract.declaring.verbs import Columns, Source
from tuneship.contract.errors import SourceError
from tuneship.contract.lines import strict_json
from tuneship.contract.lines.dataset_lines import LINE_LIMIT_BYTES, decode_line
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.line_fields import ALIASES, FIELDS, STRUCTURED_FIELDS
from tuneship.contract.lines.reading_lines import BYTE_ORDER_MARK, is_longer, lines_up_to

Record = dict[str, Any]
QUOTED = re.compile(r'"[^"]*"')
# Rows in memory at a time, where a source hands out several. A row may have megabytes.
ROWS_AT_A_TIME = 100
PARQUET_BUFFER_BYTES = 1 << 20
# Fields that may hold the turns of a conversation.
TURNS = ("messages", "conversations", "prompt", "completion")
# Parts of a table's columns that hold JSON, as it is written or read already.
JSON_TEXT, JSON_VALUE = "json text", "json value"


class _Unfit(Exception):
    """A value that JSON does not have; the message is the end of a sentence about it."""


def records(source: Source, columns: Columns | None = None) -> Iterator[Record]:
    """The rows of a source as the service reads them; `columns` maps fields to columns, and unmapped columns are left
    out.

    A path ending in `.csv` or `.parquet` is read as such, any other path and any open file as JSON Lines. Raises
    `SourceError`, some of them only at the row that is at fault.
    """
    _check_fields(columns)
    given: Any = source
    if isinstance(given, str | os.PathLike):
        return _from_path(Path(cast("str", given)), columns)
    if hasattr(given, "encoding"):
        raise SourceError("the file: open it in binary mode, as in open(path, 'rb')")
    if hasattr(given, "read"):
        return _from_json_lines(given, "the file", columns)
    if hasattr(given, "itertuples"):
        chosen = _chosen("the frame", list(given.columns), columns)
        # Column by column, as choosing several at once would copy them.
        cells = [given[column] for column in chosen.values()]
        return _from_columns("the frame", chosen, [cells])
    if isinstance(given, Mapping):
        message = "a mapping is not rows; of a DatasetDict choose one split, as in data['train']"
        raise SourceError(message)
    if hasattr(given, "to_batches"):
        chosen = _chosen("the table", list(given.column_names), columns)
        batches = given.to_batches(max_chunksize=ROWS_AT_A_TIME)
        return _from_arrow("the table", chosen, given.schema, batches)
    if getattr(given, "column_names", None) is not None:
        chosen = _chosen("the dataset", list(given.column_names), columns)
        # Neither arrays of another library nor, for columns that nobody asked for, decoded pictures.
        plain = given.with_format(None).select_columns([*set(chosen.values())])
        batches = plain.iter(batch_size=ROWS_AT_A_TIME)
        cells = ([batch[column] for column in chosen.values()] for batch in batches)
        known: Any = getattr(given, "features", None) or {}
        kinds = {field: _kind_of_feature(known.get(column)) for field, column in chosen.items()}
        return _from_columns("the dataset", chosen, cells, kinds)
    if isinstance(given, Iterable) and not isinstance(given, bytes | bytearray):
        return _from_mappings(cast("Iterable[object]", given), columns)
    kinds = "a path, an open file, a frame, a dataset or an iterable of mappings"
    raise SourceError(f"the source is of type {type(given).__name__}, and must be {kinds}")


def parse_columns(text: str) -> dict[str, str]:
    """Read `instruction=question,response=answer`; a column with a comma is put in double quotes, as in CSV."""
    try:
        parts = next(csv.reader([text], strict=True), list[str]())
    except csv.Error:
        raise SourceError("columns: a double quote is not closed") from None
    columns: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        field, equals, column = (piece.strip() for piece in part.partition("="))
        if not (field and equals and column):
            raise SourceError(f"columns: part {number} must be of the form field=column")
        if field in columns:
            # A field that does not exist may be a word of the user's.
            shown = field if field in FIELDS else "a field"
            raise SourceError(f"columns: part {number} gives {shown} a second time")
        columns[field] = column
    _check_fields(columns)
    return columns


def is_json_lines(path: str | os.PathLike[str]) -> bool:
    """Whether a file is read as JSON Lines: any file without another format's ending."""
    return Path(path).suffix.lower() not in READERS


def _check_fields(columns: Columns | None) -> None:
    if columns is None:
        return
    if not columns:
        raise SourceError("columns: name at least one field with its column")
    for number, field in enumerate(columns, 1):
        if field not in FIELDS:
            message = f"columns: part {number} names no field; the fields are {', '.join(FIELDS)}"
            raise SourceError(message)


@contextmanager
def opened(path: Path) -> Generator[BinaryIO]:
    """A file of the caller's, open for reading. Raises `SourceError`."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise SourceError(f"{path}: no such file") from None
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    with file:
        yield file


def _from_path(path: Path, columns: Columns | None) -> Iterator[Record]:
    reader = READERS.get(path.suffix.lower(), _from_json_lines)
    with opened(path) as file:
        try:
            yield from reader(file, str(path), columns)
        except OSError as error:
            raise SourceError(f"{path}: cannot be read ({error.strerror})") from None


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """The lines of a file without a byte order mark. One that is too long must not fill the memory."""
    for number, line in enumerate(lines_up_to(file, LINE_LIMIT_BYTES), 1):
        if is_longer(line, LINE_LIMIT_BYTES):
            raise SourceError(f"{name}, line {number}: is longer than 8 MiB")
        yield line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line


def _from_json_lines(file: BinaryIO, name: str, columns: Columns | None) -> Iterator[Record]:
    def rows() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, line in enumerate(_lines(file, name), 1):
            if line.strip():
                try:
                    yield f"{name}, line {number}", decode_line(line.strip())
                except ExampleProblem as problem:
                    raise SourceError(f"{name}, line {number}: {problem.message}") from None

    if columns is None:
        # The service reads these lines as they are, and says itself what is wrong with them.
        return (dict(row) for _, row in rows())
    return _from_objects(rows(), name, columns)


def _from_mappings(source: Iterable[object], columns: Columns | None) -> Iterator[Record]:
    def rows() -> Iterator[tuple[str, Mapping[str, Any]]]:
        for number, row in enumerate(source, 1):
            if not isinstance(row, Mapping):
                raise SourceError(f"row {number}: is no mapping from fields to values")
            fields = cast("Mapping[str, Any]", row)
            if columns is None:
                _check_extra(f"row {number}", list(fields))
            yield f"row {number}", fields

    return _from_objects(rows(), "the rows", columns)


def _from_objects(
    rows: Iterable[tuple[str, Mapping[str, Any]]], name: str, columns: Columns | None
) -> Iterator[Record]:
    """Records from rows with different keys: a column may be missing in some of them."""
    sought = set[str]() if columns is None else set(columns.values())
    for where, row in rows:
        sought.difference_update(row)
        if columns is None:
            yield _record(where, row.items())
        else:
            yield _record(where, [(field, row.get(column)) for field, column in columns.items()])
    if columns is not None and sought:
        missing = " or ".join(map(str, sorted(sought)))
        raise SourceError(f"{name}: no row has a column {missing}")


def _from_csv(file: BinaryIO, name: str, columns: Columns | None) -> Iterator[Record]:
    # A quote that is not closed would make one field of the rest of the file. One limit holds for all readers of the
    # process, at first 128 KiB. It is raised and never lowered, since others may rely on a higher one.
    csv.field_size_limit(max(LINE_LIMIT_BYTES, csv.field_size_limit()))
    lines = _decoded(_lines(file, name), name)
    first = next(lines, "")
    # Where numbers are written with a comma, spreadsheets separate cells by semicolons.
    mark = max(",;\t", key=QUOTED.sub("", first).count)
    reader = csv.reader(chain([first] if first else [], lines), delimiter=mark, strict=True)
    places: dict[str, int] | None = None
    width, start = 0, 1
    try:
        for cells in reader:
            where, start = f"{name}, line {start}", reader.line_num + 1
            found = cells
            # Spreadsheets add empty cells beyond the last column.
            while len(found) > max(width, 1) and not found[-1].strip():
                found = found[:-1]
            if places is None and reader.line_num == 1 and found in (["sep="], ["sep=,"]):
                continue  # a word to Excel
            if places is None:
                if len(found) == 1 and "|" in found[0]:
                    raise SourceError(
                        f"{where}: cells must be separated by commas, semicolons or tabs"
                    )
                found, width = [cell.strip() for cell in found], len(found)
                chosen = _chosen(f"{where} (the names of the columns)", found, columns)
                places = {field: found.index(column) for field, column in chosen.items()}
            elif found and len(found) != width:
                raise SourceError(
                    f"{where}: has {count(len(cells), 'cell')}, and the first line {width}"
                )
            elif any(found):  # a blank line is no row
                yield _record(where, [(field, found[at] or None) for field, at in places.items()])
    except csv.Error as error:
        raise SourceError(f"{name}, line {start}: {_csv_fault(str(error))}") from None
    if places is None:
        raise SourceError(f"{name}: is empty; its first line must name the columns")


def _csv_fault(error: str) -> str:
    if "limit" in error:
        return "a field is longer than 8 MiB, or its double quote is never closed"
    if "new-line" in error:
        return "has a carriage return that is neither in double quotes nor before a line feed"
    return "a double quote is missing or out of place"


def _decoded(lines: Iterable[bytes], name: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        try:
            yield line.decode()
        except UnicodeDecodeError:
            raise SourceError(
                f"{name}, line {number}: is not UTF-8: save the file as UTF-8"
            ) from None


def _from_parquet(file: BinaryIO, name: str, columns: Columns | None) -> Iterator[Record]:
    try:
        # An extra, and without types.
        pyarrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError:
        message = "reading Parquet takes pyarrow: pip install pyarrow"
        raise SourceError(f"{name}: {message}") from None
    try:
        # Otherwise a group of rows is read as a whole, and most files have a single one.
        table = parquet.ParquetFile(file, buffer_size=PARQUET_BUFFER_BYTES, pre_buffer=False)
        chosen = _chosen(name, table.schema_arrow.names, columns)
        batches = table.iter_batches(ROWS_AT_A_TIME, columns=[*set(chosen.values())])
        yield from _from_arrow(name, chosen, table.schema_arrow, batches)
    except (pyarrow.ArrowException, OSError, ValueError):
        # Its messages quote what they found.
        raise SourceError(f"{name}: cannot be read as Parquet") from None


def _from_arrow(
    name: str, chosen: Columns, schema: Any, batches: Iterable[Any]
) -> Iterator[Record]:
    def cells(batch: Any) -> list[list[object]]:
        try:
            return [
                batch.column(column).to_pylist(maps_as_pydicts="strict")
                for column in chosen.values()
            ]
        except KeyError:
            raise SourceError(f"{name}: a map holds one key twice") from None

    kinds = {field: _kind_of_arrow(schema.field(column).type) for field, column in chosen.items()}
    return _from_columns(name, chosen, map(cells, batches), kinds)


def _kind_of_arrow(given: Any) -> Any:
    """How to read values of an Arrow type: `JSON_TEXT`, an object, a list of objects, or None for plain values."""
    if getattr(given, "extension_name", "") == "arrow.json":
        return JSON_TEXT
    if hasattr(given, "value_type"):
        return [_kind_of_arrow(given.value_type)]
    if hasattr(given, "fields"):
        return {one.name: _kind_of_arrow(one.type) for one in given.fields}
    return None


def _kind_of_feature(given: Any) -> Any:
    """How to read values of a Hugging Face feature: `JSON_VALUE` for parsed JSON, otherwise as `_kind_of_arrow`
    says.
    """
    if type(given).__name__ == "Json":
        return JSON_VALUE
    if isinstance(given, dict):
        members = cast("dict[str, Any]", given).items()
        return {name: _kind_of_feature(one) for name, one in members}
    if isinstance(given, list):
        return [_kind_of_feature(one) for one in cast("list[Any]", given)]
    return [_kind_of_feature(given.feature)] if hasattr(given, "feature") else None


def _from_columns(
    name: str,
    fields: Iterable[str],
    batches: Iterable[Sequence[Iterable[object]]],
    kinds: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Record]:
    """Records of a table, batch by batch, with one column for each field; `kinds` marks columns with JSON."""
    rows = (row for batch in batches for row in zip(*batch, strict=True))
    for number, row in enumerate(rows, 1):
        yield _record(f"{name}, row {number}", zip(fields, row, strict=True), kinds)


def _chosen(name: str, found: Sequence[object], columns: Columns | None) -> Columns:
    """The column of each field in a table. Raises `SourceError` for one that is missing, ambiguous or extra."""
    if columns is None:
        missing = [field for field, names in ALIASES.items() if not {*names}.intersection(found)]
        if missing and "messages" not in found and "conversations" not in found:
            message = f"there is no column {' and no column '.join(missing)}"
            raise SourceError(f"{name}: {message}; say with columns which ones to take")
        _check_extra(name, found)
        chosen: Columns = {field: field for field in FIELDS if field in found}
    else:
        chosen = columns
        missing = [str(column) for column in chosen.values() if column not in found]
        if missing:
            raise SourceError(f"{name}: there is no column {' and no column '.join(missing)}")
    for column in chosen.values():
        if found.count(column) > 1:
            raise SourceError(f"{name}: there are several columns {column}")
    return chosen


def _check_extra(name: str, found: Sequence[object]) -> None:
    """Refuse columns that the service would ignore: they may hold a patient's name, and should not leave the
    machine.
    """
    extra = [str(at) for at, column in enumerate(found, 1) if column not in FIELDS]
    if extra:
        places = ", ".join(extra[:5]) + (" and others" if extra[5:] else "")
        message = (
            f"column {places} is no field" if not extra[1:] else f"columns {places} are no fields"
        )
        raise SourceError(f"{name}: {message} of a dataset; say with columns which ones to take")
    for field, names in ALIASES.items():
        if sum(column in names for column in found) > 1:
            message = f"several columns are read as {field}"
            raise SourceError(f"{name}: {message}; say with columns which one to take")


def _record(
    where: str, cells: Iterable[tuple[str, object]], kinds: Mapping[str, Any] | None = None
) -> Record:
    """One row in JSON types, without its missing values; `kinds` are those of the table's columns."""
    record: Record = {}
    for field, cell in cells:
        try:
            value = _plain(cell)
            if isinstance(value, str) and field in STRUCTURED_FIELDS:
                # Here nulls are as somebody wrote them.
                value = _from_json(value) if value.strip() else None
            elif kinds is not None:
                value = _without_missing(value, kinds.get(field), keeps_turns=field in TURNS)
        except (_Unfit, strict_json.JsonRefused) as reason:
            raise SourceError(f"{where}, {field}: {reason}") from None
        except RecursionError:
            raise SourceError(f"{where}, {field}: is nested too deeply") from None
        if value is not None:
            record[field] = value
    return record


def _from_json(text: str) -> object:
    return strict_json.parse(text.encode(), strict_json.MAXIMUM_VALUES_OF_LINE)


def _without_missing(value: Any, kind: Any, *, keeps_turns: bool = False) -> Any:
    """A cell without the nulls that its objects have because objects of other rows have the key.

    JSON in it keeps its nulls, and so do turns: to the service their own nulls are missing, while those of a call or a
    part would be text to learn.
    """
    if kind == JSON_TEXT:
        return _from_json(value) if isinstance(value, str) else value
    if kind == JSON_VALUE:
        return value
    if isinstance(value, list):
        element: Any = cast("list[Any]", kind)[0] if isinstance(kind, list) and kind else None
        return [
            {
                name: _without_missing(part, _part(element, name))
                for name, part in cast("Record", one).items()
            }
            if keeps_turns and isinstance(one, dict) and element != JSON_VALUE
            else _without_missing(one, element)
            for one in cast("list[Any]", value)
        ]
    if isinstance(value, dict):
        members = cast("Record", value).items()
        return {
            key: _without_missing(one, _part(kind, key)) for key, one in members if one is not None
        }
    return value


def _part(kind: Any, key: str) -> Any:
    return cast("Record", kind).get(key) if isinstance(kind, dict) else None


def _plain(value: object) -> object:
    """Convert a value to JSON types; None if it is missing. Raises `_Unfit`."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Unfit("holds half of a surrogate pair") from None
        return value
    if isinstance(value, float):
        if math.isinf(value):
            raise _Unfit("is infinite")
        return None if math.isnan(value) else value
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        if not all(isinstance(key, str) for key, _ in pairs):
            raise _Unfit("has an object whose keys are not all texts")
        return {_plain(key): _plain(member) for key, member in pairs}
    if isinstance(value, list | tuple):
        return [_plain(member) for member in cast("Iterable[object]", value)]
    return _unwrapped(value)


def _unwrapped(value: Any) -> object:
    # What arrays and numbers of numpy, pyarrow and torch have in common.
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    kind = type(value).__name__
    # By name, so that pandas need not be loaded.
    if kind in ("NAType", "NaTType"):
        return None
    raise _Unfit(f"is of type {kind}, which JSON does not have")


READERS: dict[str, Callable[[BinaryIO, str, Columns | None], Iterator[Record]]] = {
    ".csv": _from_csv,
    ".parquet": _from_parquet,
}
