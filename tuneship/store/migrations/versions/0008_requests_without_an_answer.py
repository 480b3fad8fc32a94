"""Metric windows also hold cancelled and refused requests, and how many callers met errors"""

import struct

from alembic import op
import sqlalchemy as sa

revision = '0008'
down_revision = '0007'
branch_labels = None
depends_on = None

# What follows is how windows were stored before and are stored from here on: nothing of it may change with the code.

OLD = struct.calcsize('<5q4d19I')  # a record: requests first; then, in a window, its sketch
COUNT = struct.calcsize('<q')
AT_ONCE = 1000


def upgrade():
    """To each record come cancelled 0, refused 0, its requests as those of which nobody counted that, callers 0."""
    connection = op.get_bind()
    table = sa.table(
        'metric_windows',
        *(sa.column(name) for name in ('deployment_id', 'endpoint_id', 'width', 'start', 'window', 'minutes')),
    )
    key = (table.c.deployment_id, table.c.endpoint_id, table.c.width, table.c.start)
    change = sa.update(table).where(*(column == sa.bindparam(f'at_{column.name}') for column in key))
    page = sa.select(table).order_by(*key).limit(AT_ONCE)
    rows = connection.execute(page).all()
    while rows:
        connection.execute(change, [_changed(row) for row in rows])
        after = sa.tuple_(*key) > sa.tuple_(*(sa.literal(value) for value in rows[-1][:4]))
        rows = connection.execute(page.where(after)).all()


def _changed(row):
    return {
        'at_deployment_id': row.deployment_id, 'at_endpoint_id': row.endpoint_id,
        'at_width': row.width, 'at_start': row.start,
        'window': _record(row.window[:OLD]) + row.window[OLD:],
        'minutes': None if row.minutes is None else b''.join(
            _record(row.minutes[first:first + OLD]) for first in range(0, len(row.minutes), OLD)
        ),
    }


def _record(old):
    return old + bytes(2 * COUNT) + old[:COUNT] + bytes(COUNT)
