"""Files that go from a service to an agent, in pieces between which other messages may go."""

from base64 import b64encode
from collections.abc import Awaitable, Callable
from pathlib import Path

from tuneship.host.thread_pools import Threads
from tuneship.runtime.agent_protocol import PIECE_BYTES


def sorted_files(folder: Path) -> list[Path]:
    """The files of a folder by their names, without those of its folders. Raises `OSError`."""
    return sorted(file for file in folder.iterdir() if file.is_file())


async def send_pieces(file: Path, threads: Threads, send: Callable[[str], Awaitable[None]]) -> None:
    """Send a file as it is, each piece as Base64; an empty file is one empty piece. Raises `OSError`."""
    with await threads.run(file.open, "rb") as opened:
        is_whole = False
        while not is_whole:
            piece = await threads.run(opened.read, PIECE_BYTES)
            is_whole = len(piece) < PIECE_BYTES
            await send(b64encode(piece).decode())


def is_file_name(text: str) -> bool:
    """Whether a name names a file in a folder, and leads nowhere else."""
    return text not in ("", ".", "..") and Path(text).name == text


def append_piece(file: Path, content: bytes) -> None:
    """Keep a piece that has come behind those before it. Raises `OSError`."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with file.open("ab") as opened:
        opened.write(content)
