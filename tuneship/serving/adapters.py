"""Reads a LoRA directory in peft's format without peft: scaled A and B matrices by module name.

An option that cannot be followed exactly is refused by its name. Knows no model; `lora` fits the matrices to one.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tuneship.security.sealed_files import read_plain

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")

# Options of peft's LoraConfig that, when set, change the computation or add tensors to it.
_UNSUPPORTED = (
    "use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication",
    "target_parameters", "trainable_token_indices", "alora_invocation_tokens", "arrow_config", "kasa_config",
    "velora_config", "monteclora_config",
)  # fmt: skip


class AdapterRefused(Exception):
    """The adapter cannot be served; the message names what is wrong with its files."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """The LoRA matrices of one module: delta = x @ a.T @ b, with the scale already in `b`."""

    a: Tensor
    """[rank, in]"""
    b: Tensor
    """[rank, out]"""


def read_adapter(directory: Path, key: str | None = None) -> dict[str, Matrices]:
    """Read the matrices of each module by its name; `key` opens sealed files. Raises `AdapterRefused`."""
    try:
        config = json.loads(read_plain(directory / CONFIG, key))
        tensors = load(read_plain(directory / WEIGHTS, key))
    except (OSError, ValueError, SafetensorError) as error:
        raise AdapterRefused(f"adapter files cannot be read: {type(error).__name__}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterRefused(f"{CONFIG} does not describe a LoRA adapter")
    if config.get("bias", "none") != "none":
        raise AdapterRefused("trained biases are not supported")
    for option in _UNSUPPORTED:
        if config.get(option):
            raise AdapterRefused(f"LoRA option {option} is not supported")
    return _pair(config, tensors)


def _pair(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Matrices]:
    """Pair the A and B matrices of each module, and scale them."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.dim() != 2:
            raise AdapterRefused(f"tensor {key} is not a LoRA matrix of a linear layer")
        if not torch.isfinite(tensor).all():
            raise AdapterRefused(f"tensor {key} holds values that are not finite")
        parts.setdefault(match["module"], {})[match["part"]] = tensor
    if not parts:
        raise AdapterRefused("the adapter holds no tensors")

    patterns: Mapping[str, float] = config.get("alpha_pattern") or {}
    matrices: dict[str, Matrices] = {}
    for module, pair in parts.items():
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise AdapterRefused(f"the LoRA matrices of {module} do not fit together")
        rank = pair["A"].shape[0]
        # The rule of peft: the first key that is a suffix (as a regular expression) of the module name.
        suffixes = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
        suffix = next(suffixes, None)
        alpha = config.get("lora_alpha", 8) if suffix is None else patterns[suffix]
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        # Scaled in float32, so that a bfloat16 matrix is rounded once.
        b = (pair["B"].float().t() * scale).to(pair["B"].dtype)
        matrices[module] = Matrices(a=pair["A"], b=b)
    return matrices
