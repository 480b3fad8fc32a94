"""A file that is fetched in pieces is whole, also where an earlier fetch of it was given up and still writes."""

from pathlib import Path

from tuneship.agents.agent_files import read_piece, write_piece
from tuneship.agents.agent_protocol import PIECE_BYTES


def test_a_late_write_of_a_fetch_that_was_given_up_changes_nothing(tmp_path: Path) -> None:
    content = bytes(range(251)) * (2 * PIECE_BYTES // 251)
    sent, fetched = tmp_path / "sent", tmp_path / "fetched"
    sent.write_bytes(content)
    fetched.touch()
    offset = 0
    while piece := read_piece(sent, offset):
        write_piece(fetched, offset, piece)
        offset += len(piece)
    assert offset == len(content)
    write_piece(fetched, 0, read_piece(sent, 0))
    assert fetched.read_bytes() == content
