"""A sealed file returns what was written or is reported as damaged. No part of it can be changed, moved or left out."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tuneship.security.sealed_files import (
    ObjectDamaged,
    new_key,
    open_plain,
    read_plain,
    write_sealed,
)

SEGMENT = 1 << 20
TEXT = os.urandom(3 * SEGMENT)
KEY = new_key()


@pytest.mark.parametrize("size", [0, 1, SEGMENT - 57, SEGMENT - 56, SEGMENT, len(TEXT)])
def test_a_sealed_file_gives_back_what_was_written(tmp_path: Path, size: int) -> None:
    file = tmp_path / "data"
    write_sealed(file, KEY, TEXT[:size])
    assert read_plain(file, KEY) == TEXT[:size]
    assert size < 32 or TEXT[:32] not in file.read_bytes()


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    write_sealed(tmp_path / "data", KEY, b"one\n" * SEGMENT)
    with open_plain(tmp_path / "data", KEY) as file:
        assert file.readline() == b"one\n"
        assert sum(1 for _ in file) == SEGMENT - 1


def test_without_a_key_a_file_is_plain(tmp_path: Path) -> None:
    write_sealed(tmp_path / "data", None, b"plain")
    assert (tmp_path / "data").read_bytes() == read_plain(tmp_path / "data", None) == b"plain"


def flipped(sealed: bytes, position: int) -> bytes:
    changed = bytearray(sealed)
    changed[position] ^= 1
    return bytes(changed)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "head": lambda sealed: flipped(sealed, 0),
    "salt": lambda sealed: flipped(sealed, 5),
    "second segment": lambda sealed: flipped(sealed, SEGMENT + 7),
    "last byte": lambda sealed: flipped(sealed, -1),
    "empty": lambda sealed: b"",
    "half a head": lambda sealed: sealed[:20],
    "one segment": lambda sealed: sealed[:SEGMENT],
    "without the last segment": lambda sealed: sealed[: 3 * SEGMENT],
    "without the last byte": lambda sealed: sealed[:-1],
    "a byte more": lambda sealed: sealed + b"x",
    "without a segment": lambda sealed: sealed[:SEGMENT] + sealed[2 * SEGMENT :],
    "reordered": lambda sealed: b"".join(
        sealed[start : start + SEGMENT] for start in (0, 2 * SEGMENT, SEGMENT, 3 * SEGMENT)
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_file_that_was_changed_cut_off_or_reordered_is_damaged(
    tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "data"
    write_sealed(file, KEY, TEXT)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ObjectDamaged):
        read_plain(file, KEY)


def test_no_file_passes_for_another(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_sealed(one, KEY, b"text")
    write_sealed(two, new_key(), b"text")
    # The file was sealed with the key of another object.
    with pytest.raises(ObjectDamaged):
        read_plain(two, KEY)
    one.rename(two)
    # The file belongs to the same object, but under another name.
    with pytest.raises(ObjectDamaged):
        read_plain(two, KEY)


def test_a_full_disk_is_reported_as_one() -> None:
    for size in (3, 3 * SEGMENT):
        with pytest.raises(OSError, match="No space left"):
            write_sealed(Path("/dev/full"), KEY, TEXT[:size])
