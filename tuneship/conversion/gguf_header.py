"""The header of a GGUF file: its settings and the table of its tensors. Loads neither torch nor the weights.

A header names counts and lengths that a damaged file may have wrong, so nothing is read beyond the end of the file.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

MAGIC = b"GGUF"
# Version 1 counted in 32 bits; no program writes it any more.
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# The other kinds of values: unsigned and signed whole numbers, floats and booleans.
NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
# The number formats that can be converted: name, values and bytes of a block.
FORMATS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56),
}  # fmt: skip
PLAIN_FORMATS = frozenset({"F32", "F16", "BF16"})

_LAYER = {
    f"{name}.weight"
    for name in (
        *("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output"),
        *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
    )
}
# The architectures that are converted, with the tensors of each of their layers.
LAYER_TENSORS: Mapping[str, frozenset[str]] = {
    "llama": frozenset(_LAYER),
    "qwen2": frozenset(_LAYER | {f"attn_{part}.bias" for part in "qkv"}),
    "qwen3": frozenset(_LAYER | {f"attn_{part}_norm.weight" for part in "qk"}),
}
# The settings that the conversion understands. Another one may change what the model computes.
KNOWN_SETTINGS = frozenset(
    {
        *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
        *("rope.dimension_count", "rope.freq_base", "attention.head_count"),
        *("attention.head_count_kv", "attention.layer_norm_rms_epsilon"),
        *("attention.key_length", "attention.value_length"),
    }
)


# How a byte-level tokenizer cuts text before it joins bytes, by the names of llama.cpp: those that transformers knows,
# and those for which GPT-2's way, its default, gives the same tokens. With another one the model reads other tokens.
KNOWN_CUTS = frozenset(
    {
        *("default", "gpt-2", "smollm", "llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"),
        *("smaug-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "gpt-4o"),
    }
)
# The tensor by which Llama 3.1 and later slow the rotations of its positions down.
ROPE_FACTORS = "rope_freqs.weight"


class GgufRefused(Exception):
    """The file cannot be converted; the message says why, in one clause."""


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file's table."""

    name: str
    # In the order of torch: the rows first.
    shape: tuple[int, ...]
    format: str
    # Position of its data in the file.
    begin: int


@dataclass(frozen=True)
class GgufHeader:
    """The settings and tensors of a complete file."""

    # Numbers and texts by name; of an array its length.
    settings: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        """The architecture that the file names."""
        return str(self.settings.get("general.architecture", ""))

    def setting(self, name: str) -> Any:
        """A setting of the architecture, e.g. `block_count`; None without it."""
        return self.settings.get(f"{self.architecture}.{name}")

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def is_quantized(self) -> bool:
        """Whether some weights are kept in blocks of few bits."""
        return any(tensor.format not in PLAIN_FORMATS for tensor in self.tensors)

    @property
    def licence(self) -> str | None:
        """The licence that the file names."""
        named = self.settings.get("general.license")
        return named if isinstance(named, str) and named else None


def read_header(file: Path) -> GgufHeader:
    """Read the header and check that all tensors are in the file. Raises `GgufRefused` and `OSError`."""
    with file.open("rb") as opened:
        if opened.read(4) != MAGIC:
            raise GgufRefused("it is not a GGUF file")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _Parser(content).header()
            except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
                raise GgufRefused("it is cut or damaged") from error


def check_convertible(header: GgufHeader) -> None:
    """Raise `GgufRefused` unless every setting and tensor of the file has its place in a model that is served."""
    kind, known = header.architecture, LAYER_TENSORS.get(header.architecture)
    if known is None:
        raise GgufRefused(
            f"its architecture is not converted: those of {', '.join(LAYER_TENSORS)} are"
        )
    names = {tensor.name for tensor in header.tensors}
    for name, value in header.settings.items():
        prefix, _, own = name.partition(".")
        is_plain = own == "rope.scaling.type" and value == "none"
        if prefix == kind and own not in KNOWN_SETTINGS and not is_plain:
            raise GgufRefused(f"its setting {name} is not known here")
    is_cut = header.settings.get("tokenizer.ggml.model") == "gpt2"
    if is_cut and header.settings.get("tokenizer.ggml.pre", "default") not in KNOWN_CUTS:
        raise GgufRefused("its setting tokenizer.ggml.pre is not known here")
    layers = header.setting("block_count")
    if not isinstance(layers, int) or not 0 < layers <= len(names):
        raise GgufRefused(f"its setting {kind}.block_count is missing or wrong")
    needed = {"token_embd.weight", "output_norm.weight"}
    needed |= {f"blk.{number}.{name}" for number in range(layers) for name in known}
    if missing := sorted(needed - names):
        raise GgufRefused(f"{len(missing)} of its tensors are missing, {missing[0]} first")
    if unknown := sorted(names - needed - {"output.weight", ROPE_FACTORS}):
        raise GgufRefused(f"{len(unknown)} of its tensors are not known here, {unknown[0]} first")


class _Parser:
    """Reads values one after the other; an error of `struct` when the file ends too early."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = len(MAGIC)

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version not in VERSIONS:
            raise GgufRefused("it is of a version of GGUF that is not read here")
        tensors, settings = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(settings):
            name = self._text()
            values[name] = self._value(self._number("I"))
        table: list[GgufTensor] = []
        for _ in range(tensors):
            name = self._text()
            shape = tuple(self._number("Q") for _ in range(self._number("I")))
            number, begin = self._number("I"), self._number("Q")
            if number not in FORMATS:
                raise GgufRefused(f"its tensor {name} has a number format that is not read here")
            table.append(GgufTensor(name, tuple(reversed(shape)), FORMATS[number][0], begin))

        # The table counts places from the end of the header, which is filled up.
        alignment = values.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise GgufRefused("it is cut or damaged")
        data = -(-self._at // alignment) * alignment
        found = tuple(replace(tensor, begin=data + tensor.begin) for tensor in table)
        # Every tensor must lie within the file.
        blocks = {name: (values_a_block, size) for name, values_a_block, size in FORMATS.values()}
        for tensor in found:
            values_a_block, size = blocks[tensor.format]
            rows, rest = divmod(prod(tensor.shape), values_a_block)
            if rest or tensor.begin + rows * size > len(self._content):
                raise IndexError
        return GgufHeader(values, found)

    def _number(self, kind: str) -> Any:
        (value,) = struct.unpack_from(f"<{kind}", self._content, self._at)
        self._at += struct.calcsize(f"<{kind}")
        return value

    def _text(self) -> str:
        length = self._number("Q")
        end = self._at + length
        if end > len(self._content):
            raise IndexError
        found = self._content[self._at : end]
        self._at = end
        return found.decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            # It is passed over, and only its length is kept: vocabularies are read by transformers.
            member, count = self._number("I"), self._number("Q")
            if member in NUMBERS:
                self._at += count * struct.calcsize(NUMBERS[member])
            elif member == STRING:
                for _ in range(count):
                    length = self._number("Q")
                    self._at += length
            else:
                raise GgufRefused("it is cut or damaged")
            if self._at > len(self._content):
                raise IndexError
            return count
        if kind not in NUMBERS:
            raise GgufRefused("it is cut or damaged")
        return self._number(NUMBERS[kind])
