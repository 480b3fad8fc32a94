"""A digest of a base model's files, with which a node proves that it has the same model as the service."""

import hashlib
from contextlib import suppress
from pathlib import Path

from tuneship.agents.agent_protocol import CannotServe
from tuneship.host.file_digest import sha256_of
from tuneship.host.weight_files import WeightsFault, weight_files

# What a replica reads beside the weights: configuration, and tokenizer for answers that follow a schema.
SIDE_FILES = ("config.json", "tokenizer.json")


class BaseDigests:
    """Computes digests, and keeps them while the files stay the same."""

    def __init__(self) -> None:
        """Begin without digests."""
        self._known: dict[Path, tuple[tuple[object, ...], str]] = {}

    def of(self, base: Path) -> str:
        """Return the digest of a directory. Reads all weights when they are new; raises `OSError`."""
        files = [file for name in SIDE_FILES if (file := base / name).is_file()]
        with suppress(WeightsFault):  # whoever loads them says so; vLLM knows other kinds of files
            files += weight_files(base).files
        if not files:
            raise FileNotFoundError(f"{base} is no base model")
        files.sort()
        stats = [file.stat() for file in files]
        state = tuple((one.st_ino, one.st_size, one.st_mtime_ns) for one in stats)
        known = self._known.get(base)
        if known is None or known[0] != state:
            total = hashlib.sha256()
            for file in files:
                total.update(f"{file.name} {sha256_of(file)}\n".encode())
            known = self._known[base] = (state, total.hexdigest())
        return known[1]


def check_base(base: Path, digest: str) -> None:
    """Check that the node has the base model with this digest. Raises `CannotServe`."""
    try:
        own = BaseDigests().of(base)
    except OSError as error:
        text = f"the node cannot read the base model {base.name}: {type(error).__name__}"
        raise CannotServe(text) from error
    if own != digest:
        raise CannotServe(f"the base model {base.name} of the node is another one")
