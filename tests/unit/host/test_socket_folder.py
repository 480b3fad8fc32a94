"""The folder of a Unix socket has a short path and can be written."""

from pathlib import Path

import pytest

from tuneship.host.socket_folder import MAX_FOLDER_LENGTH, socket_folder


def test_a_preferred_folder_is_taken_if_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda folder, _mode: folder != "/locked")
    long = "/" + "a" * MAX_FOLDER_LENGTH
    assert socket_folder("/short", "/other") == "/short"
    assert socket_folder(long, "/locked", "/other") == "/other"
    assert socket_folder(long, usual=("/usual",)) == "/usual"


def test_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="short enough"):
        socket_folder(str(tmp_path / "missing"), usual=())
