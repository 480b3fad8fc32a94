"""Files that go between a service and an agent, in pieces between which other messages may go."""

from base64 import b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path

from tuneship.agents.agent_protocol import PIECE_BYTES
from tuneship.host.thread_pools import Threads


def sorted_files(folder: Path) -> list[Path]:
    """The files of a folder, sorted by name, without subfolders. Raises `OSError`."""
    return sorted(file for file in folder.iterdir() if file.is_file())


async def send_pieces(file: Path, threads: Threads, send: Callable[[str], Awaitable[None]]) -> None:
    """Send a file as it is, each piece as Base64; an empty file is one empty piece. Raises `OSError`."""
    offset, is_whole = 0, False
    while not is_whole:
        piece = await threads.run(read_piece, file, offset)
        offset, is_whole = offset + len(piece), len(piece) < PIECE_BYTES
        await send(b64encode(piece).decode())


def read_piece(file: Path, offset: int) -> bytes:
    """The piece that begins at an offset, in bytes; it is shorter than `PIECE_BYTES` at the end. Raises `OSError`."""
    # Opened for each piece: a file that a thread opens for a caller who is cancelled meanwhile would stay open.
    with file.open("rb") as opened:
        opened.seek(offset)
        return opened.read(PIECE_BYTES)


def write_piece(file: Path, offset: int, content: bytes) -> None:
    """Write bytes at their offset in an existing file. Raises `OSError`."""
    # Not at the end: a thread that goes on for a caller who was cancelled must not lengthen the file of the next one.
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(content)


def is_file_name(text: str) -> bool:
    """Whether a name names a file in a folder, and leads nowhere else."""
    return text not in ("", ".", "..") and Path(text).name == text


def append_piece(file: Path, content: bytes) -> None:
    """Append a piece to a file, which is made if it is not there. Raises `OSError`."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.write(content)
