"""Reads a LoRA directory in peft's format without peft: scaled A and B matrices by module name.

An option that cannot be followed exactly is refused by its name. Knows no model; `lora` fits the matrices to one.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tuneship.security.sealed_files import read_plain

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")

# The fields of peft's LoraConfig that are followed here, and those that change nothing once the adapter is trained. Any
# other one that is set is refused by its name, so also the fields of a newer peft.
FOLLOWED = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias",
    "init_lora_weights", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern",
})  # fmt: skip
WITHOUT_EFFECT = frozenset({
    "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout",
    "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size",
    "runtime_config", "ensure_weight_tying",
})  # fmt: skip
# Ways to begin a training that leave the base model's weights as they are; True and False are such, too. The others
# (`pissa`, `olora`, `corda`, `lora_ga`, `loftq`) put a part of these weights into the adapter.
PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica")
CONVERTIBLE_STARTS = ("pissa", "olora", "corda", "lora_ga")
# peft's own values where the file names none.
DEFAULT_RANK = DEFAULT_ALPHA = 8


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
    if not isinstance(config, dict):
        raise AdapterRefused(f"{CONFIG} does not describe a LoRA adapter")
    _refuse_unsupported(cast("dict[str, Any]", config))
    try:
        return _pair(cast("dict[str, Any]", config), tensors)
    except (TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
        raise AdapterRefused(f"{CONFIG} is not understood: {type(error).__name__}") from error


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "LORA":
        raise AdapterRefused(
            f"{CONFIG} does not describe a LoRA adapter (its peft_type is {kind!s:.40})"
        )
    if task not in (None, "CAUSAL_LM"):
        raise AdapterRefused(f"the adapter is for another task (its task_type is {task!s:.40})")
    if config.get("bias", "none") != "none":
        raise AdapterRefused(
            "LoRA option bias is not supported: it changes the base model's biases"
        )
    for option, value in config.items():
        if value and option not in FOLLOWED | WITHOUT_EFFECT:
            raise AdapterRefused(f"LoRA option {option} is not supported")
    start = config.get("init_lora_weights", True)
    if not start or start is True or str(start).lower() in PLAIN_STARTS:
        return
    problem = f"LoRA option init_lora_weights is {start!s:.40}, with which peft changes the base model's weights"
    if str(start).lower().startswith(CONVERTIBLE_STARTS):
        raise AdapterRefused(
            f"{problem}: convert the adapter by save_pretrained(..., path_initial_model_for_weight_conversion=...) "
            "where it was trained"
        )
    raise AdapterRefused(f"{problem}: it is right with those weights alone")


def _pair(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Matrices]:
    """Pair the A and B matrices of each module, and scale them."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        match = _KEY.fullmatch(key)
        if match is None or tensor.dim() != 2:
            raise AdapterRefused(f"tensor {key} is not a LoRA matrix of a linear layer")
        if not torch.isfinite(tensor).all():
            raise AdapterRefused(f"tensor {key} holds values that are not finite")
        if not _is_target(match["module"], config):
            raise AdapterRefused(f"tensor {key} is of a layer that {CONFIG} leaves out")
        parts.setdefault(match["module"], {})[match["part"]] = tensor
    if not parts:
        raise AdapterRefused("the adapter holds no tensors")

    matrices: dict[str, Matrices] = {}
    for module, pair in parts.items():
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise AdapterRefused(f"the LoRA matrices of {module} do not fit together")
        rank = _by_pattern(config.get("rank_pattern"), module, config.get("r", DEFAULT_RANK))
        if pair["A"].shape[0] != rank:
            raise AdapterRefused(
                f"the LoRA matrices of {module} are of rank {pair['A'].shape[0]}, and {CONFIG} says {rank}"
            )
        alpha = config.get("lora_alpha", DEFAULT_ALPHA)
        alpha = _by_pattern(config.get("alpha_pattern"), module, alpha)
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        # In float32, as peft computes, so that a matrix of 16 bits is rounded by the model's own number format alone.
        matrices[module] = Matrices(a=pair["A"], b=pair["B"].float().t() * scale)
    return matrices


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """Peft's rule: the value of the first key that is a suffix (as a regular expression) of the module's name."""
    found = (key for key in patterns or {} if re.match(rf"(.*\.)?({key})$", module))
    key = next(found, None)
    return default if patterns is None or key is None else patterns[key]


def _is_target(module: str, config: Mapping[str, Any]) -> bool:
    """Whether peft reads matrices of this module: those of other ones it passes over."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and _is_named(module, excluded):
        return False
    if targets is None:
        raise AdapterRefused(f"{CONFIG} has no target_modules")
    if targets == "all-linear":
        return True
    if not _is_named(module, targets):
        return False
    layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern")
    if isinstance(targets, str) or layers is None or layers == []:
        return True
    names: list[str] = [pattern] if isinstance(pattern, str) else list(pattern or [])
    found = (re.match(rf"(?:^|.*?\.){name}\.(?P<layer>\d+)\.", module) for name in names)
    # Without a pattern, the first number in the name counts.
    any_layer = re.match(r".*?\.[^.]*\.(?P<layer>\d+)\.", module)
    match = next((one for one in found if one), None) if names else any_layer
    return match is not None and int(match["layer"]) in np.atleast_1d(layers)


def _is_named(module: str, names: str | Sequence[str]) -> bool:
    """Whether a regular expression matches the whole name, or one of several names is its end."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(f".{module}".endswith(f".{name}") for name in names)
