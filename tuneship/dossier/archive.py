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
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            return _members(archive, known)
    except (zipfile.BadZipFile, NotImplementedError, OverflowError, OSError, EOFError) as fault:
        raise NoDossier("the file is no zip archive, or a damaged one") from fault


def _members(archive: zipfile.ZipFile, known: Collection[str]) -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for entry in archive.infolist():
        name = entry.orig_filename
        if name not in known:
            # A name from outside may be a path, or as long as the file.
            raise NoDossier(f"it holds {name[:40]!r}, which no dossier has")
        if name in members:
            raise NoDossier(f"it holds {name} twice")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 0x1:
            raise NoDossier(f"{name} is compressed or encrypted, and no dossier packs its members")
        # Uncompressed, a member cannot be larger than the file.
        if entry.file_size != entry.compress_size:
            raise NoDossier(f"{name} says a size that it does not have")
        members[name] = _content(archive, entry)
    return members


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    try:
        return archive.read(entry)
    except (zipfile.BadZipFile, EOFError, OSError, ValueError) as fault:
        raise NoDossier(f"{entry.orig_filename} was changed: its checksum is wrong") from fault
