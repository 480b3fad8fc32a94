"""The types of rows name exactly the columns of their tables."""

import types
from typing import Any, get_args, get_type_hints

import pytest
import sqlalchemy as sa

from tuneship.store.database import row_types, tables
from tuneship.store.database.column_types import UtcDateTime


def row_type_of(table: sa.Table) -> Any:
    """Return the type in the annotation of the table's variable, e.g. `TypedTable[DatasetRow]`."""
    annotation: str = tables.__annotations__[table.name]
    return getattr(row_types, annotation.removeprefix("TypedTable[").removesuffix("]"))


@pytest.mark.parametrize("table", tables.METADATA.sorted_tables, ids=lambda table: table.name)
def test_a_row_type_has_the_columns_of_its_table_and_their_nulls(table: sa.Table) -> None:
    hints = get_type_hints(row_type_of(table))
    assert hints.keys() == set(table.c.keys())
    nullable = {name for name, hint in hints.items() if types.NoneType in get_args(hint)}
    assert nullable == {column.name for column in table.c if column.nullable}


@pytest.mark.parametrize("table", tables.METADATA.sorted_tables, ids=lambda table: table.name)
def test_a_row_type_says_what_a_column_holds(table: sa.Table) -> None:
    hints = get_type_hints(row_type_of(table))
    for column in table.c:
        if isinstance(column.type, sa.JSON):
            continue
        kind = column.type
        expected = (kind.impl_instance if isinstance(kind, UtcDateTime) else kind).python_type
        hint = hints[column.name]
        # The arguments of a `Literal` are texts, those of a union are types.
        held = {type(one) if isinstance(one, str) else one for one in (hint, *get_args(hint))}
        assert expected in held, column.name
