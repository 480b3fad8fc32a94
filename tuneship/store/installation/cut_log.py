"""Detects a truncated write-ahead log of SQLite, which SQLite itself does not report.

After a kill the newest changes are in the log, `<file>-wal`, and its index, `<file>-shm`, says how many pages the log
has. SQLite discards incomplete changes silently when it opens the database, and makes a new index. The index is written
after the log is on the disk, so it never names more than what was there. Without the index, only the signed heads of
the audit chain show a loss.
"""

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

# The index begins with the same header twice: its version, three other numbers, the number of pages in the log, ...
HEADER_BYTES = 48
VERSION, PAGES = struct.Struct("=I"), struct.Struct("=16xI")
KNOWN_VERSION = 3_007_000
# After the two headers: how many of the log's pages are in the database file, too.
COPIED = struct.Struct("=96xI")
# Two numbers that are drawn whenever the log begins again at its start, in the log's header and in the index.
SALT_IN_LOG, SALT_IN_INDEX = slice(16, 24), slice(32, 40)


def lost_pages(database: Path) -> int:
    """How many pages of the newest changes are neither in the log nor in the database file.

    It opens the database, so a second call finds nothing. No other process may use the database meanwhile.
    """
    index, log = (database.with_name(f"{database.name}-{name}") for name in ("shm", "wal"))
    if not index.is_file() or not database.is_file():
        return 0
    content, salt = index.read_bytes(), log.read_bytes()[SALT_IN_LOG] if log.is_file() else b""
    header = content[:HEADER_BYTES]
    # Nothing flushes the index to the disk: a power failure may leave one that is empty, half-written or older.
    proves_something = (
        len(content) >= COPIED.size
        and header == content[HEADER_BYTES : 2 * HEADER_BYTES]
        and VERSION.unpack_from(header) == (KNOWN_VERSION,)
        and (not salt or salt == header[SALT_IN_INDEX])
    )
    if not proves_something:
        return 0
    (expected,), (copied,) = PAGES.unpack_from(header), COPIED.unpack_from(content)
    try:
        with closing(sqlite3.connect(database)) as connection:
            is_busy, found, _ = connection.execute("pragma wal_checkpoint(passive)").fetchone()
    except sqlite3.Error:  # whoever opens it next will say what is wrong with it
        return 0
    # Where the log ends too early, its older pages replace newer ones of the file. Where the log is gone, the pages
    # survive that were copied into the file.
    return 0 if is_busy else max(0, expected - (found if found > 0 else copied))
