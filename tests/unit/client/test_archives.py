"""Folders as archives: what is sent of an adapter, and what a download becomes or leaves."""

import io
import tarfile
from pathlib import Path

import pytest

from tuneship.client.archives import SENT, WEIGHTS, archive_of, downloaded
from tuneship.client.error_text import SHOWN_DETAILS, error_text
from tuneship.contract.errors import ErrorDetail, InvalidRequestError, SourceError


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in (WEIGHTS, "adapter_config.json", "README.md"):
        (folder / name).write_text(f"content of {name}")
    return folder


def test_an_archive_holds_what_the_service_needs_and_nobodys_name(adapter: Path) -> None:
    with archive_of(adapter) as first, archive_of(adapter) as second:
        content = first.read()
        assert content == second.read(), "a repeated call sends the same bytes"
        first.seek(0)
        with tarfile.open(fileobj=first) as archive:
            members = archive.getmembers()
    assert {one.name for one in members} == {WEIGHTS, "adapter_config.json"} <= set(SENT)
    assert {(one.uid, one.gid, one.uname, one.mtime) for one in members} == {(0, 0, "", 0)}


def test_an_archive_that_is_no_adapter_is_refused_with_its_place(adapter: Path) -> None:
    with pytest.raises(SourceError, match="gone: no such directory"), archive_of(adapter / "gone"):
        pass
    (adapter / WEIGHTS).unlink()
    with pytest.raises(SourceError, match=f"has no {WEIGHTS}"), archive_of(adapter):
        pass
    (adapter / "adapter_model.bin").touch()
    with pytest.raises(SourceError, match="a pickle only"), archive_of(adapter):
        pass


def test_a_download_becomes_a_whole_folder(adapter: Path, tmp_path: Path) -> None:
    target = tmp_path / "model"
    with downloaded(target) as (file, unpack):
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(adapter, "notes")
        unpack()
    assert (target / WEIGHTS).read_text() == f"content of {WEIGHTS}"
    assert {one.name for one in tmp_path.iterdir()} == {"adapter", "model"}
    with pytest.raises(SourceError, match="model: exists already"), downloaded(target):
        pass


def test_a_broken_download_leaves_nothing(tmp_path: Path) -> None:
    wrong = pytest.raises(SourceError, match="is no archive")
    with wrong, downloaded(tmp_path / "model") as got:
        file, unpack = got
        file.write(b"no archive" * 100)
        unpack()
    assert not list(tmp_path.iterdir())
    nowhere = tmp_path / "gone" / "model"
    with pytest.raises(SourceError, match="cannot be written"), downloaded(nowhere):
        pass


@pytest.mark.parametrize("kept_bytes", [tarfile.BLOCKSIZE + 1, 3 * tarfile.BLOCKSIZE])
def test_a_download_that_is_cut_off_leaves_nothing(kept_bytes: int, tmp_path: Path) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        entry = tarfile.TarInfo("model/file")
        entry.size = 3 * tarfile.BLOCKSIZE
        archive.addfile(entry, io.BytesIO(bytes(entry.size)))
    wrong = pytest.raises(SourceError, match="is no archive")
    with wrong, downloaded(tmp_path / "model") as (file, unpack):
        file.write(whole.getvalue()[:kept_bytes])
        unpack()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../outside", "model/../../outside", "/outside"])
def test_a_download_writes_nothing_outside_its_folder(name: str, tmp_path: Path) -> None:
    entry = tarfile.TarInfo(name)
    refuse_entry(entry, tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_download_holds_only_files_and_folders(kind: bytes, tmp_path: Path) -> None:
    entry = tarfile.TarInfo("model/file")
    entry.type, entry.linkname = kind, "/etc/hostname"
    refuse_entry(entry, tmp_path)


def refuse_entry(entry: tarfile.TarInfo, folder: Path) -> None:
    """Check that a download with this entry is refused and leaves nothing."""
    wrong = pytest.raises(SourceError, match="is no archive")
    with wrong, downloaded(folder / "model") as (file, unpack):
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.addfile(entry)
        unpack()
    assert not list(folder.iterdir())


def test_a_refusal_is_shown_with_its_places_and_its_request() -> None:
    details = [ErrorDetail(field="response", code="missing", message="is required", line=7)]
    details += [ErrorDetail(field=None, code="conflict", message="no")] * SHOWN_DETAILS
    error = InvalidRequestError("two fields are wrong", details=details)
    error.request_id = "req_1"
    lines = error_text(error).splitlines()
    assert lines[0] == "the service refused (400 invalid_request_error): two fields are wrong"
    assert lines[1:3] == ["  line 7, response: missing: is required", "  request: conflict: no"]
    assert lines[-1] == "  request req_1"
    assert len(lines) == SHOWN_DETAILS + 2
