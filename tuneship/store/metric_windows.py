"""Stored windows of one second: written by merging, read by deployment and span."""

from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from tuneship.metrics.recorder import WindowKey
from tuneship.metrics.windows import Window, merged, window_from_json
from tuneship.store.tables import metric_windows


def store(connection: sa.Connection, windows: Mapping[WindowKey, Window]) -> None:
    """Add counts to what is stored; the given windows stay as they are, for the case that this is rolled back."""
    for key, window in windows.items():
        place = (
            (metric_windows.c.deployment_id == key.deployment_id)
            & (metric_windows.c.endpoint_id == key.endpoint_id)
            & (metric_windows.c.start == key.start)
        )
        kept = connection.execute(sa.select(metric_windows.c.window).where(place)).scalar()
        if kept is not None:
            connection.execute(sa.delete(metric_windows).where(place))
        total = window if kept is None else merged((window, window_from_json(kept)))
        connection.execute(
            sa.insert(metric_windows).values(
                deployment_id=key.deployment_id,
                endpoint_id=key.endpoint_id,
                start=key.start,
                window=total.as_json(),
            )
        )


def forget(connection: sa.Connection, before: int) -> None:
    """Drop windows that started before a moment (epoch seconds)."""
    connection.execute(sa.delete(metric_windows).where(metric_windows.c.start < before))


def between(
    connection: sa.Connection,
    deployment_id: str,
    endpoint_id: str | None,
    start: int,
    end: int,
) -> Sequence[tuple[int, Window]]:
    """Windows that start in [start, end), epoch seconds, in rising order."""
    query = (
        sa.select(metric_windows.c.start, metric_windows.c.window)
        .where(
            metric_windows.c.deployment_id == deployment_id,
            metric_windows.c.start >= start,
            metric_windows.c.start < end,
        )
        .order_by(metric_windows.c.start)
    )
    if endpoint_id is not None:
        query = query.where(metric_windows.c.endpoint_id == endpoint_id)
    return [(begun, window_from_json(one)) for begun, one in connection.execute(query)]
