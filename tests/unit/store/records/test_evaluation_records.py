"""Pages of an evaluation's scores are read from where they begin, in either direction."""

from itertools import islice
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy import event

from tuneship.store.database.database import Database
from tuneship.store.database.tables import evaluation_scores
from tuneship.store.records.evaluation_records import FIRST_PARTS, numbered_results

# Parts of 1, 2, 3 and again 1, 2, 3 scores ... of one evaluation, and one of another.
COUNT = 600


@pytest.fixture
def stored(database: Database) -> Database:
    parts: list[dict[str, Any]] = [
        {"evaluation_id": "evl_b", "position": 0, "results": [{"line": -1}]}
    ]
    position = 0
    while position < COUNT:
        lines = range(position, position + len(parts) % 3 + 1)
        results = [{"line": line} for line in lines if line < COUNT]
        parts.append({"evaluation_id": "evl_a", "position": position, "results": results})
        position += len(results)
    with database.write() as connection:
        connection.execute(sa.insert(evaluation_scores), parts)
    return database


@pytest.mark.parametrize("first", [0, 1, 2, 3, 299, 300, 301, COUNT - 2, COUNT - 1])
def test_scores_are_read_forwards_and_backwards_from_any_one(stored: Database, first: int) -> None:
    with stored.read() as connection:
        rising = list(numbered_results(connection, "evl_a", first))
        falling = list(numbered_results(connection, "evl_a", first, is_rising=False))
    assert rising == [(n, {"line": n}) for n in range(first, COUNT)]
    assert falling == [(n, {"line": n}) for n in range(first, -1, -1)]


def test_scores_behind_the_ends_are_none(stored: Database) -> None:
    with stored.read() as connection:
        assert list(numbered_results(connection, "evl_a", COUNT)) == []
        assert list(numbered_results(connection, "evl_a", -1, is_rising=False)) == []
        assert list(numbered_results(connection, "evl_c", 0)) == []


@pytest.mark.parametrize("is_rising", [True, False])
def test_a_page_reads_a_few_parts_alone(stored: Database, is_rising: bool) -> None:
    asked: list[Any] = []

    def note(*call: Any) -> None:
        asked.append(call[2:4])

    with stored.read() as connection:
        event.listen(connection, "after_cursor_execute", note)
        found = numbered_results(connection, "evl_a", 300, is_rising=is_rising)
        page = [number for number, _ in islice(found, 4)]
    assert page == [300, 301, 302, 303] if is_rising else [300, 299, 298, 297]
    [parameters] = [parameters for statement, parameters in asked if "LIMIT" in statement]
    values = parameters.values() if isinstance(parameters, dict) else parameters
    assert FIRST_PARTS in values
