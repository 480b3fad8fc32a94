"""Finds the files of a checkpoint that hold its weights: those that transformers reads, among any others.

A folder may also hold the weights in another form (`consolidated.safetensors`), shards of an older version or an
adapter, whose files are named here, too. Loads no large library.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The setting of config.json that names the file or the index itself.
NAMED_BY_CONFIG = "transformers_weights"
# A file in the same folder.
PLAIN_NAME = re.compile(r"[\w.-]+\.safetensors(\.index\.json)?")


class WeightsFault(ValueError):
    """The weight files of a checkpoint are not known or not all there; the message begins with "its" or "it"."""


@dataclass(frozen=True)
class WeightFiles:
    """The weight files of one checkpoint."""

    # In the order of their names. A tensor that is in several counts as it is in the last one.
    files: tuple[Path, ...]
    # The index that names them.
    index: Path | None = None
    # The tensors that the index names.
    tensors: frozenset[str] = frozenset()


def weight_files(folder: Path) -> WeightFiles:
    """Find the weight files in a folder. Raises `WeightsFault`.

    They are those that config.json names, `model.safetensors`, those of the index, or the only one of the folder.
    """
    named = _named_by_config(folder)
    index = folder / (named if named is not None else INDEX)
    if named is not None and not named.endswith(".json"):
        return WeightFiles((_present(folder, named),))
    if named is None and (folder / SINGLE).is_file():
        return WeightFiles((folder / SINGLE,))
    if named is not None or index.is_file():
        shards = _shards(index)
        names = sorted(set(shards.values()))
        return WeightFiles(
            tuple(_present(folder, name) for name in names), index, frozenset(shards)
        )
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise WeightsFault("it has no safetensors file")
    if len(found) > 1:
        raise WeightsFault(
            f"it has several safetensors files ({len(found)}), and neither {SINGLE} nor {INDEX}, which says what they "
            "hold"
        )
    return WeightFiles(tuple(found))


def _named_by_config(folder: Path) -> str | None:
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        named = config.get(NAMED_BY_CONFIG)
    except (OSError, ValueError, AttributeError):
        return None  # whoever reads the configuration says so
    if named is None:
        return None
    if not isinstance(named, str) or not PLAIN_NAME.fullmatch(named):
        raise WeightsFault(
            f"its config.json names no file beside it as its weights ({NAMED_BY_CONFIG})"
        )
    return named


def _shards(index: Path) -> dict[str, str]:
    """The file of each tensor that an index names."""
    try:
        shards: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = set[Any](shards.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise WeightsFault(f"its {index.name} cannot be read") from None
    if not names:
        raise WeightsFault(f"its {index.name} names no file")
    if not all(
        isinstance(name, str) and PLAIN_NAME.fullmatch(name) and not name.endswith(".json")
        for name in names
    ):
        raise WeightsFault(f"its {index.name} names files that are no safetensors files beside it")
    return cast("dict[str, str]", shards)


def _present(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise WeightsFault(f"its {name} is missing")
    return folder / name
