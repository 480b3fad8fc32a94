"""The file of a dossier: a zip whose bytes follow from its members, so that no byte of it can change unseen.

Members stand in order of their names, uncompressed, without times and modes. Knows nothing of what they mean.
"""

import zipfile
from collections.abc import Collection, Mapping
from io import BytesIO

# A release of a month has records of some tens of megabytes.
MAX_BYTES = 256 * 1024 * 1024
# The earliest time that a zip can hold; a member has none.
NO_TIME = (1980, 1, 1, 0, 0, 0)
# The record that ends an archive without a comment, the place of the size of its list of members in it, and the record
# before it of an archive that is too large for that.
END_MARK, END_BYTES, LIST_SIZE = b"PK\x05\x06", 22, slice(12, 16)
LARGE_END_MARK, LARGE_END_BYTES = b"PK\x06\x07", 20
MAX_LIST_BYTES = 64 * 1024
UNIX, PRIVATE_FILE = 3, 0o100600 << 16


class NoDossier(ValueError):
    """The file is not a dossier; the message says why in one sentence."""


def pack(members: Mapping[str, bytes]) -> bytes:
    """The file with these members; equal members give equal bytes."""
    file = BytesIO()
    # Uncompressed: what another release of zlib packs differently would not be the same file.
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            entry = zipfile.ZipInfo(name, NO_TIME)
            entry.create_system, entry.external_attr = UNIX, PRIVATE_FILE
            archive.writestr(entry, members[name])
    return file.getvalue()


def unpack(content: bytes, known: Collection[str]) -> dict[str, bytes]:
    """The members of a file. Raises `NoDossier` for members that are not `known`, doubled, packed or damaged."""
    end = content[-END_BYTES:]
    if not end.startswith(END_MARK):
        raise NoDossier("the file is no zip archive, or a damaged one")
    # Before the list is read: of a large one, each entry costs a hundred times its bytes.
    listed = int.from_bytes(end[LIST_SIZE], "little")
    before_it = content[-END_BYTES - LARGE_END_BYTES : -END_BYTES]
    if listed > MAX_LIST_BYTES or before_it.startswith(LARGE_END_MARK):
        raise NoDossier("it lists more members than any dossier has")
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            return _members(archive, known)
    except (zipfile.BadZipFile, NotImplementedError, OverflowError, OSError, EOFError) as fault:
        raise NoDossier("the file is no zip archive, or a damaged one") from fault


def _members(archive: zipfile.ZipFile, known: Collection[str]) -> dict[str, bytes]:
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        name = entry.orig_filename
        if name not in known:
            # A name from outside may be a path, or as long as the file.
            raise NoDossier(f"it holds {name[:40]!r}, which no dossier has")
        if name in entries:
            raise NoDossier(f"it holds {name} twice")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 0x1:
            raise NoDossier(f"{name} is compressed or encrypted, and no dossier packs its members")
        # Uncompressed, a member cannot be larger than the file.
        if entry.file_size != entry.compress_size:
            raise NoDossier(f"{name} says a size that it does not have")
        entries[name] = entry
    # They may lie one over the other.
    if sum(entry.file_size for entry in entries.values()) > MAX_BYTES:
        raise NoDossier("its members are larger than a dossier may be")
    return {name: _content(archive, entry) for name, entry in entries.items()}


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    try:
        return archive.read(entry)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as fault:
        raise NoDossier(f"{entry.orig_filename} was changed: its checksum is wrong") from fault
