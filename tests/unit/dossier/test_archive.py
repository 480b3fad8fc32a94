"""The file of a dossier follows from its members, and a file that is none is refused in one sentence."""

import io
import struct
import zipfile
from collections.abc import Callable

import pytest

from tuneship.dossier.archive import MAX_BYTES, NoDossier, pack, unpack
from tuneship.dossier.checks import verify

KNOWN = ("a.json", "b.json")
MEMBERS = {"a.json": b"{}", "b.json": b"a longer text, which is not packed"}


def zipped(*entries: tuple[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(name, content)
    return file.getvalue()


def test_equal_members_give_equal_bytes_in_any_order() -> None:
    assert pack(MEMBERS) == pack(dict(reversed(MEMBERS.items())))
    assert unpack(pack(MEMBERS), KNOWN) == MEMBERS


def with_size(content: bytes) -> bytes:
    """The first member claims to be of another size, in the list at the end."""
    changed = bytearray(content)
    place = changed.index(b"PK\x01\x02")
    struct.pack_into("<I", changed, place + 24, 4_000_000_000)
    return bytes(changed)


def with_list_of(entries: int) -> bytes:
    """An archive whose list alone is long: each entry points to the same member."""
    content = pack({"a.json": b"{}"})
    start, end = content.index(b"PK\x01\x02"), content.index(b"PK\x05\x06")
    listed = content[start:end] * entries
    ending = bytearray(content[end:])
    struct.pack_into("<I", ending, 12, len(listed))
    return content[:start] + listed + bytes(ending)


def with_large_ending() -> bytes:
    """The record of a larger archive stands before the end, and says where another list is."""
    content = pack(MEMBERS)
    return content[:-22] + b"PK\x06\x07" + bytes(16) + content[-22:]


def lying_over_each_other() -> bytes:
    """Two members are the same 160 MiB of the file."""
    content = pack({"a.json": bytes(160 << 20)})
    start, end = content.index(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    first = content[start:end]
    ending = bytearray(content[end:])
    struct.pack_into("<I", ending, 12, 2 * len(first))
    struct.pack_into("<HH", ending, 8, 2, 2)
    return content[:start] + first + first.replace(b"a.json", b"b.json") + bytes(ending)


def encrypted(content: bytes) -> bytes:
    changed = bytearray(content)
    place = changed.index(b"PK\x01\x02")
    struct.pack_into("<H", changed, place + 8, 1)
    return bytes(changed)


REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "text": (lambda: b"no archive", "no zip archive"),
    "nothing": (lambda: b"", "no zip archive"),
    "cut off": (lambda: pack(MEMBERS)[:-10], "no zip archive"),
    "added": (lambda: zipped(("evil.txt", b"x")), "'evil.txt', which no dossier has"),
    "a path": (lambda: zipped(("../a.json", b"x")), "'../a.json', which no dossier has"),
    "an absolute path": (lambda: zipped(("/a.json", b"x")), "'/a.json', which no dossier has"),
    "a folder": (lambda: zipped(("a.json/", b"")), "'a.json/', which no dossier has"),
    "compressed": (
        lambda: zipped(("a.json", bytes(10**7)), compression=zipfile.ZIP_DEFLATED),
        "a.json is compressed or encrypted",
    ),
    "encrypted": (lambda: encrypted(pack(MEMBERS)), "a.json is compressed or encrypted"),
    "a long list": (lambda: with_list_of(2_000), "lists more members than any dossier has"),
    "a list elsewhere": (with_large_ending, "lists more members than any dossier has"),
    "a comment": (lambda: pack(MEMBERS) + b"more", "no zip archive"),
    "a name of a terminal": (lambda: zipped(("\x1b[2J" + "x" * 9_000, b"")), "'\\x1b[2Jxxx"),
    "a size that is not so": (lambda: with_size(pack(MEMBERS)), "a.json says a size"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_no_dossier_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(NoDossier) as refused:
        unpack(make(), KNOWN)
    assert words in str(refused.value)
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 100


def test_members_that_lie_over_each_other_are_refused_before_they_are_read() -> None:
    with pytest.raises(NoDossier, match="its members are larger than a dossier may be"):
        unpack(lying_over_each_other(), KNOWN)


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
def test_a_member_that_is_there_twice_is_refused() -> None:
    with pytest.raises(NoDossier, match=r"a\.json twice"):
        unpack(zipped(("a.json", b"1"), ("a.json", b"2")), KNOWN)


def test_every_flipped_bit_of_a_member_is_found() -> None:
    content = pack(MEMBERS)
    for name, member in MEMBERS.items():
        start = content.index(member)
        for place in range(start, start + len(member)):
            changed = bytearray(content)
            changed[place] ^= 1
            with pytest.raises(NoDossier, match=f"{name} was changed"):
                unpack(bytes(changed), KNOWN)


def test_a_dossier_without_a_needed_member_or_too_large_is_refused() -> None:
    with pytest.raises(NoDossier, match=r"lacks manifest\.json"):
        verify(pack({"result.json": b"{}"}))
    with pytest.raises(NoDossier, match=r"lacks release\.jsonl"):
        verify(pack({"result.json": b"{}", "manifest.json": b"{}"}))
    with pytest.raises(NoDossier, match="larger than 256 MiB"):
        verify(bytes(MAX_BYTES + 1))


@pytest.mark.parametrize("hostile", [b"[" * 100_000, b"{}", b"[1]", b"\xff", b'{"members": 1}'])
def test_members_that_hold_something_else_are_findings(hostile: bytes) -> None:
    names = ("manifest.json", "result.json", "release.jsonl", "rollout.jsonl", "training.json")
    found = verify(pack(dict.fromkeys((*names, "audit-head.jsonl", "model_card.json"), hostile)))
    assert found.problems
    assert all("\n" not in one and len(one) < 200 for one in found.problems)
