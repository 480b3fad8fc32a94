"""Finds out whether SQLite's write-ahead log holds what the last process wrote into it; SQLite itself does not say.

After a kill the newest changes are in the log, `<file>-wal`, and its index, `<file>-shm`, tells how many of its pages
count. Whoever opens the database next drops what is not whole, without a word, and makes a new index. The index is
written after the log is on the disk, so it never names more than what was there. Without it nothing can be said: then
only the signed heads of the audit chain show what is missing.
"""

import sqlite3
import struct
from contextlib import closing
from pathlib import Path

# The index begins with the same header twice: its version, three other numbers, the number of pages in the log, ...
HEADER_BYTES = 48
VERSION, PAGES = struct.Struct("=I"), struct.Struct("=16xI")
KNOWN_VERSION = 3_007_000
# Behind the two: how many of the log's pages are in the database file, too.
COPIED = struct.Struct("=96xI")


def lost_pages(database: Path) -> int:
    """How many pages of the newest changes are neither in the log nor in the database file.

    It opens the database, so a second call finds nothing. No other process may use the database meanwhile.
    """
    index = database.with_name(f"{database.name}-shm")
    if not index.is_file() or not database.is_file():
        return 0
    content = index.read_bytes()
    header = content[:HEADER_BYTES]
    # A power failure may leave an index that is empty or half-written, which proves nothing.
    if len(content) < COPIED.size or header != content[HEADER_BYTES : 2 * HEADER_BYTES]:
        return 0
    if VERSION.unpack_from(header) != (KNOWN_VERSION,):
        return 0
    (expected,), (copied,) = PAGES.unpack_from(header), COPIED.unpack_from(content)
    try:
        with closing(sqlite3.connect(database)) as connection:
            _, found, _ = connection.execute("pragma wal_checkpoint(passive)").fetchone()
    except sqlite3.Error:  # whoever opens it next will say what is wrong with it
        return 0
    # Where the log ends too early, its older pages replace newer ones of the file. Where it is gone, the file counts.
    return max(0, expected - (found if found > 0 else copied))
