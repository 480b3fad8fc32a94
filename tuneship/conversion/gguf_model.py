"""Converts a GGUF file into a checkpoint of safetensors, by transformers' own reader of such files.

transformers unpacks the blocks of a quantized file, but does not save the model again: its tensors are saved here.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tuneship.conversion.gguf_header import (
    ROPE_FACTORS,
    GgufHeader,
    GgufRefused,
    check_convertible,
    read_header,
)
from tuneship.prompts.template import PromptTemplate

WEIGHTS = "model.safetensors"
# The settings of the rotation of all Llama models since 3.1 but for the factor.
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read_gguf(folder: Path, name: str) -> tuple[PreTrainedModel, GgufHeader]:
    """Read the model in float32, with its configuration. Raises `GgufRefused` and whatever transformers raises."""
    header = read_header(folder / name)
    check_convertible(header)
    options: dict[str, Any] = {"gguf_file": name, "local_files_only": True}
    config: Any = AutoConfig.from_pretrained(folder, **options)
    # transformers does not take the size of a head from the file for every architecture.
    names = ("rope.dimension_count", "attention.key_length", "attention.value_length")
    sizes = {size for key in names if (size := header.setting(key)) is not None}
    if len(sizes) > 1:
        raise GgufRefused("its rotary embedding covers a part of each head, which is not read here")
    if sizes:
        config.head_dim = sizes.pop()
    _set_rotation(header, folder / name, config)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, output_loading_info=True, **options
    )
    model, report = loaded
    if report["missing_keys"]:
        raise GgufRefused(f"transformers did not find {min(report['missing_keys'])} in it")
    for parameter, weights in model.named_parameters():
        if not torch.isfinite(weights).all():
            raise GgufRefused(f"its tensor {parameter} holds values that are not finite")
    return model, header


def _set_rotation(header: GgufHeader, file: Path, config: Any) -> None:
    """Find the settings of Llama 3.1's rotation that give the file's factors, which transformers leaves out."""
    tensor = next((one for one in header.tensors if one.name == ROPE_FACTORS), None)
    if tensor is None:
        return
    theta = header.setting("rope.freq_base") or 10_000.0
    if tensor.format != "F32" or tensor.shape != (config.head_dim // 2,):
        raise GgufRefused(f"its {ROPE_FACTORS} does not fit the size of its heads")
    factors = torch.from_numpy(np.fromfile(file, "<f4", tensor.shape[0], offset=tensor.begin))
    settings = {**LLAMA3, "factor": float(factors.max()), "rope_theta": theta}
    expected = rope_factors(settings, config.head_dim)
    if not torch.allclose(factors, expected, rtol=1e-3):
        raise GgufRefused(
            f"its rotary embedding is scaled ({ROPE_FACTORS}) differently from Llama's"
        )
    config.rope_parameters = {**settings, "rope_type": "llama3"}


def rope_factors(settings: Mapping[str, Any], head_dim: int) -> Tensor:
    """By how much Llama 3.1 and later slow down each rotation [head_dim / 2]."""
    turns = torch.arange(0, head_dim, 2) / head_dim
    length, theta = settings["original_max_position_embeddings"], settings["rope_theta"]
    turns = length / (2 * math.pi * theta**turns)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - share) / settings["factor"] + share)


def save_checkpoint(model: PreTrainedModel, header: GgufHeader, folder: Path) -> None:
    """Write configuration and weights. Raises `SafetensorError` when the disk is full."""
    kept = number_format(model, header)
    # The norms and biases are few, and stay as they are.
    tensors: dict[str, Tensor] = {
        name: (tensor.to(kept) if tensor.dim() > 1 else tensor).contiguous()
        for name, tensor in model.state_dict().items()
        if not (model.config.tie_word_embeddings and name == "lm_head.weight")
    }
    config: Any = model.config
    config.dtype = kept
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def number_format(model: PreTrainedModel, header: GgufHeader) -> torch.dtype:
    """The format in which the matrices are kept: the file's own, and 16 bits for a quantized file.

    The blocks of a quantized file are scaled by 16-bit numbers, so that float16 loses next to nothing of them.
    """
    formats = {tensor.format for tensor in header.tensors if len(tensor.shape) > 1}
    if formats == {"F32"}:
        return torch.float32
    if formats == {"BF16"}:
        return torch.bfloat16
    most = max(float(weights.detach().abs().max()) for weights in model.parameters())
    return torch.float16 if most <= torch.finfo(torch.float16).max else torch.float32


def save_tokenizer(source: Path, name: str, folder: Path) -> None:
    """Write the tokenizer and the chat template of the file. Raises `TemplateFailed`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(source, gguf_file=name, local_files_only=True)
    tokenizer.save_pretrained(folder)
    PromptTemplate.load(folder)
