"""The requests that the members of a cluster may still pass in a window, which they take in chunks.

A member passes only what it has taken, so all together never pass more than the limit; a chunk is a share of what is
left, so little stays with members that do not need it. Postgres only. The table is unlogged: a crash of the server
empties it, and the windows begin again.
"""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from tuneship.store.database.tables import rate_windows

# A chunk is this part of what is left: four chunks for each of four members.
PARTS = 16


def take(
    connection: sa.Connection, client_id: str, kind: str, ends: int, limit: int
) -> tuple[int, int]:
    """Take a chunk of the window that ends at epoch second `ends`; return it and the rest for later chunks."""
    left = sa.func.greatest(0, limit - rate_windows.c.taken)
    chunk = (left + PARTS - 1) // PARTS
    first = (limit + PARTS - 1) // PARTS
    taking = (
        insert(rate_windows)
        .values(client_id=client_id, kind=kind, ends=ends, taken=first, chunk=first)
        .on_conflict_do_update(
            index_elements=[rate_windows.c.client_id, rate_windows.c.kind, rate_windows.c.ends],
            set_={"taken": rate_windows.c.taken + chunk, "chunk": chunk},
        )
        .returning(rate_windows.c.chunk, rate_windows.c.taken)
    )
    taken = connection.execute(taking).one()
    return taken.chunk, max(0, limit - taken.taken)


def forget(connection: sa.Connection, now: float) -> None:
    """Delete the windows that ended more than a minute ago."""
    connection.execute(sa.delete(rate_windows).where(rate_windows.c.ends < now - 60))
