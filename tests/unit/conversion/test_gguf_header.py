"""A GGUF file is read as far as it is whole and known; every other one is refused in a sentence."""

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.families import build_family
from tests.support.models.gguf_files import write_gguf
from tuneship.conversion.gguf_header import FORMATS, GgufRefused, check_convertible, read_header


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def content(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A whole file."""
    return write_gguf(checkpoint, tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def refusal(file: Path) -> str:
    with pytest.raises(GgufRefused) as refused:
        check_convertible(read_header(file))
    return str(refused.value)


def test_a_whole_file_tells_its_architecture_size_and_licence(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    header = read_header(tmp_path / "a.gguf")
    check_convertible(header)
    assert (header.architecture, header.licence) == ("llama", "apache-2.0")
    assert header.setting("block_count") == 2
    assert not header.is_quantized
    assert {tensor.name for tensor in header.tensors} >= {
        "token_embd.weight",
        "blk.1.ffn_up.weight",
    }
    shapes = {(32,), (32, 32), (16, 32), (64, 32), (32, 64), (261, 32)}
    assert {tensor.shape for tensor in header.tensors} == shapes


@pytest.mark.parametrize("number_format", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_the_number_formats_of_the_tensors_are_known(
    checkpoint: Path, tmp_path: Path, number_format: str
) -> None:
    header = read_header(write_gguf(checkpoint, tmp_path / "a.gguf", number_format))
    check_convertible(header)
    assert {tensor.format for tensor in header.tensors} == {"F32", number_format}
    assert header.is_quantized == (number_format not in ("F16", "BF16"))


def test_the_sizes_of_the_blocks_are_those_of_the_format() -> None:
    import gguf

    for number, (name, values, size) in FORMATS.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, gguf.GGML_QUANT_SIZES[kind]) == (name, (values, size))


@given(st.data())
def test_a_file_cut_anywhere_is_refused(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("cut") / "a.gguf"
    file.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    assert refusal(file) in ("it is cut or damaged", "it is not a GGUF file")


@given(st.data())
def test_a_file_with_other_bytes_is_refused_or_read(
    content: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.mktemp("other") / "a.gguf"
    at = data.draw(st.integers(4, 8000))
    other = data.draw(st.binary(min_size=1, max_size=9))
    file.write_bytes(content[:at] + other + content[at + len(other) :])
    with suppress(GgufRefused):
        check_convertible(read_header(file))


def test_counts_that_no_file_holds_cost_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    for tensors, settings in ((2**63, 0), (0, 2**63), (2**64 - 1, 2**64 - 1)):
        file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, tensors, settings) + bytes(100))
        assert refusal(file)
    huge = struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**62)
    file.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + huge)
    assert refusal(file) == "it is cut or damaged"


def test_a_number_format_that_nobody_knows_is_refused_by_the_tensors_name(
    content: bytes, tmp_path: Path
) -> None:
    name = b"blk.0.attn_q.weight"
    at = content.index(name) + len(name) + 4 + 16
    assert content[at : at + 4] == struct.pack("<I", 0)
    (tmp_path / "a.gguf").write_bytes(content[:at] + struct.pack("<I", 99) + content[at + 4 :])
    why = "its tensor blk.0.attn_q.weight has a number format that is not read here"
    assert refusal(tmp_path / "a.gguf") == why


def test_another_version_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content[:4] + struct.pack("<I", 1) + content[8:])
    assert refusal(tmp_path / "a.gguf") == "it is of a version of GGUF that is not read here"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda writer: writer.add_rope_scaling_factor(8.0),
            "its setting llama.rope.scaling.factor is not known here",
        ),
        (
            lambda writer: writer.add_expert_count(8),
            "its setting llama.expert_count is not known here",
        ),
        (
            lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(32, np.float32)),
            "1 of its tensors are not known here, blk.0.attn_q.bias first",
        ),
    ],
    ids=("rope factor", "experts", "biases"),
)
def test_tensors_that_transformers_would_leave_out_are_refused(
    checkpoint: Path, tmp_path: Path, change: Callable[[Any], object], why: str
) -> None:
    assert why in refusal(write_gguf(checkpoint, tmp_path / "a.gguf", change=change))


def test_a_tokenizer_that_cuts_text_in_an_unknown_way_is_refused(
    content: bytes, tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").write_bytes(content.replace(b"default", b"unknown"))
    assert refusal(tmp_path / "a.gguf") == "its setting tokenizer.ggml.pre is not known here"


def test_a_missing_tensor_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content.replace(b"blk.1.ffn_up", b"blk.7.ffn_up"))
    why = "1 of its tensors are missing, blk.1.ffn_up.weight first"
    assert refusal(tmp_path / "a.gguf") == why


def test_another_architecture_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content.replace(b"llama", b"bloom"))
    why = "its architecture is not converted: those of llama, qwen2, qwen3 are"
    assert refusal(tmp_path / "a.gguf") == why
