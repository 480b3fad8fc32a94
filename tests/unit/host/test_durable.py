"""Private files are replaced whole or not at all."""

from pathlib import Path

import pytest

from tests.support.objects.small_disks import fill, small_disk
from tuneship.host.deadline_file import is_past, write_deadline
from tuneship.host.durable import write_private


def test_a_private_file_for_which_there_is_no_room_leaves_the_one_before_and_nothing_else(
    tmp_path: Path,
) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        file, deadline = disk / "secret.json", disk / "deadline"
        write_private(file, "before")
        write_deadline(deadline, 0.0)
        fill(disk)
        with pytest.raises(OSError, match="No space left"):
            write_private(file, "after" * 100)
        with pytest.raises(OSError, match="No space left"):
            write_deadline(deadline, 1e300)
        assert file.read_text() == "before"
        assert file.stat().st_mode & 0o777 == 0o600
        assert is_past(deadline)
        assert {one.name for one in disk.iterdir()} == {"deadline", "filler", "secret.json"}
