"""The file in which every record is kept survives a crash, a full disk, and a second writer."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.shared.journal import FileLock, Journal, NotWritten, damage_of

ON_A_FULL_DISK = """
import json, resource, sys
from pathlib import Path
from flows.shared.journal import Journal, NotWritten

journal = Journal(Path(sys.argv[1]))
journal.append("first")
size = journal.path.stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 3, resource.RLIM_INFINITY))
try:
    journal.append("second")
except NotWritten as error:
    reported = [error.filename, bool(error.strerror)]
journal.append_if_possible("third")
waiting, content = journal.unwritten, journal.path.read_text()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
journal.append("fourth")
print(json.dumps([reported, waiting, content, journal.unwritten, journal.path.read_text()]))
"""


def test_a_disk_that_takes_half_a_line_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    ended = subprocess.run(
        [sys.executable, "-c", ON_A_FULL_DISK, str(file)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert ended.returncode == 0, ended.stderr

    error, waiting, content, unwritten, later = json.loads(ended.stdout)

    assert error == [str(file), True]
    assert content == "first\n", "half a line would be taken for the end of a crash"
    assert str(file) in waiting
    assert (unwritten, later) == ("", "first\nthird\nfourth\n"), "what waited comes first"


def test_lines_of_another_writer_are_never_cut_off(tmp_path: Path) -> None:
    mine = Journal(tmp_path / "one.jsonl")
    mine.append("a")
    Journal(mine.path).append("theirs")
    with mine.path.open("a") as file:
        file.write("half a li")

    mine.append("b")

    assert mine.path.read_text() == "a\ntheirs\nb\n"


def test_a_removed_file_is_not_begun_again_in_its_middle(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one.jsonl")
    journal.append("a")
    journal.path.rename(tmp_path / "moved")

    with pytest.raises(NotWritten, match="lost lines"):
        journal.append("b")

    assert not journal.path.exists()
    assert (tmp_path / "moved").read_text() == "a\n"


def test_a_new_file_and_its_new_folders_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    really = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    journal = Journal(tmp_path / "records" / "service" / "one.jsonl")
    journal.append("a")
    folder = tmp_path / "records"
    assert set(synced) == {str(one) for one in (tmp_path, folder, folder / "service", journal.path)}

    synced.clear()
    journal.append("b")
    assert synced == [str(journal.path)]


def test_damaged_lines_are_named_by_number_and_never_by_what_they_hold(tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_bytes(b"1\nx\n2\ny\n3")
    read, numbers = Journal(file).read(lambda line: int(line) if line.isdigit() else None)
    assert read == [1, 2], "a line without its end was never acted on"
    assert damage_of(file, numbers) == f"the record {file} cannot be read in line 2, 4"


def test_a_lock_is_held_once_and_needs_no_folder_that_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "a.lock"
    first, second = FileLock(path), FileLock(path)
    assert (first.take(), second.take()) == (True, False)
    first.release()
    assert second.take()
    second.release()

    (tmp_path / "file").touch()
    assert FileLock(tmp_path / "file" / "a.lock").take(), "what cannot be made is held by nobody"


def test_records_and_locks_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "records" / "service" / "one.jsonl")
    journal.append("a")
    lock = FileLock(journal.path.with_suffix(".lock"))
    assert lock.take()
    lock.release()
    modes = {path.stat().st_mode & 0o777 for path in journal.path.parent.iterdir()}
    folders = [journal.path.parent, journal.path.parents[1]]
    assert (modes, {one.stat().st_mode & 0o777 for one in folders}) == ({0o600}, {0o700})
