"""An archive that is made while it is sent is whole for every size of file."""

import io
import tarfile
from pathlib import Path

from tuneship.service.models.tar_stream import BLOCK_BYTES, TarStream

SIZES = (0, 1, 511, 512, 513, 1024, BLOCK_BYTES, BLOCK_BYTES + 1)


def test_an_archive_has_the_announced_length_and_every_byte(tmp_path: Path) -> None:
    for size in SIZES:
        (tmp_path / f"{size}-{'n' * 120}").write_bytes(bytes(range(256)) * (size // 256 + 1))
        with (tmp_path / f"{size}-{'n' * 120}").open("r+b") as file:
            file.truncate(size)
    expected = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    archive = TarStream(tmp_path, "model")
    for path in tmp_path.iterdir():
        path.unlink()  # as the service does before the first byte is sent
    blocks = list(archive.blocks())
    archive.close()
    assert all(blocks), "an empty block would be taken for the end"
    whole = b"".join(blocks)
    assert len(whole) == archive.length
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(whole)) as opened:
        for entry in opened:
            content = opened.extractfile(entry)
            assert content is not None
            found[Path(entry.name).name] = content.read()
    assert found == expected
