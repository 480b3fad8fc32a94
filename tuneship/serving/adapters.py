"""Reads a LoRA directory in peft's format without peft: scaled A and B matrices by module name.

Only what trainings and imports of tuneship write is read: modules by their names, and numbers. Anything else is refused
by name. peft's regular expressions are programs, which would run where all tenants' requests wait. They are replaced
when an adapter is imported (`conversion/plain_adapter.py`). Knows no model; `lora` fits the matrices to one.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from tuneship.contract.declaring.limits import MAX_LORA_RANK
from tuneship.host.memory import free_memory
from tuneship.host.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tuneship.security.sealed_files import read_plain

KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])\.weight")

# The fields of peft's LoraConfig that are followed here, and those that change nothing once the adapter is trained. Any
# other one that is set is refused by its name, so also the fields of a newer peft.
FOLLOWED = frozenset({
    "peft_type", "task_type", "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "bias",
    "init_lora_weights", "target_modules",
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
# Copies of a file in memory while it is read.
COPIES = 4


class AdapterRefused(Exception):
    """The adapter cannot be served; the message names the fault of its files."""


@dataclass(frozen=True, slots=True)
class Matrices:
    """The LoRA matrices of one module: delta = x @ a.T @ b, with the scale already in `b`."""

    # Its dimensions are rank and in.
    a: Tensor
    # Its dimensions are rank and out.
    b: Tensor


def read_adapter(directory: Path, key: str | None = None) -> dict[str, Matrices]:
    """Read the matrices of each module by its name; `key` opens sealed files. Raises `AdapterRefused`."""
    config, tensors = read_files(directory, key)
    refuse_unsupported(config, FOLLOWED)
    try:
        return _pair(config, tensors)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise AdapterRefused(
            f"{ADAPTER_CONFIG} is not understood: {type(error).__name__}"
        ) from error


def read_files(directory: Path, key: str | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The unchanged configuration and tensors of an adapter. Raises `AdapterRefused`."""
    try:
        if COPIES * (directory / ADAPTER_WEIGHTS).stat().st_size > free_memory():
            raise AdapterRefused("the free memory is not enough for the adapter")
        config = json.loads(read_plain(directory / ADAPTER_CONFIG, key))
        tensors = load(read_plain(directory / ADAPTER_WEIGHTS, key))
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise AdapterRefused(f"adapter files cannot be read: {type(error).__name__}") from error
    if not isinstance(config, dict):
        raise AdapterRefused(f"{ADAPTER_CONFIG} does not describe a LoRA adapter")
    return cast("dict[str, Any]", config), tensors


def refuse_unsupported(config: Mapping[str, Any], followed: frozenset[str]) -> None:
    """Raise `AdapterRefused` for an option that is set, is not `followed`, and would change the answers."""
    kind, task = config.get("peft_type"), config.get("task_type")
    if kind != "LORA":
        raise AdapterRefused(
            f"{ADAPTER_CONFIG} does not describe a LoRA adapter (its peft_type is {kind!s:.40})"
        )
    if task not in (None, "CAUSAL_LM"):
        raise AdapterRefused(f"the adapter is for another task (its task_type is {task!s:.40})")
    if config.get("bias", "none") != "none":
        raise AdapterRefused(
            "LoRA option bias is not supported: it changes the base model's biases"
        )
    for option, value in config.items():
        if value and option not in followed | WITHOUT_EFFECT:
            raise AdapterRefused(f"LoRA option {option:.80} is not supported")
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


def _parts(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """The A and B matrix of each module."""
    parts: dict[str, dict[str, Tensor]] = {}
    targets = _targets(config)
    for key, tensor in tensors.items():
        match = KEY.fullmatch(key)
        if match is None or tensor.dim() != 2:
            raise AdapterRefused(f"tensor {key:.200} is not a LoRA matrix of a linear layer")
        if not torch.isfinite(tensor).all():
            raise AdapterRefused(f"tensor {key:.200} holds values that are not finite")
        module = match["module"]
        if targets is not None and targets.isdisjoint(_endings(module)):
            raise AdapterRefused(
                f"tensor {key:.200} is of a layer that {ADAPTER_CONFIG} leaves out"
            )
        parts.setdefault(module, {})[match["part"]] = tensor
    if not parts:
        raise AdapterRefused("the adapter holds no tensors")
    return parts


def _pair(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Matrices]:
    """Pair the A and B matrices of each module, and scale them."""
    parts = _parts(config, tensors)
    patterns: list[Mapping[str, Any]] = []
    for option in ("rank_pattern", "alpha_pattern"):
        patterns.append(config.get(option) or {})
        if not patterns[-1].keys() <= parts.keys():
            raise AdapterRefused(
                f"{option} in {ADAPTER_CONFIG} names another module than those of the adapter: import the adapter again"
            )

    matrices: dict[str, Matrices] = {}
    for module, pair in parts.items():
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise AdapterRefused(f"the LoRA matrices of {module:.200} do not fit together")
        found = pair["A"].shape[0]
        if found > MAX_LORA_RANK:
            raise AdapterRefused(
                f"the LoRA matrices of {module:.200} are of rank {found}, and {MAX_LORA_RANK} is the most"
            )
        rank = patterns[0].get(module, config.get("r", DEFAULT_RANK))
        if found != rank:
            raise AdapterRefused(
                f"the LoRA matrices of {module:.200} are of rank {found}, and {ADAPTER_CONFIG} says {rank!s:.40}"
            )
        alpha = patterns[1].get(module, config.get("lora_alpha", DEFAULT_ALPHA))
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        # In float32, as peft computes, so that a matrix of 16 bits is rounded by the model's own number format alone.
        matrices[module] = Matrices(a=pair["A"], b=pair["B"].float().t() * scale)
    return matrices


def _targets(config: Mapping[str, Any]) -> frozenset[str] | None:
    """The names of the modules to change, or their ends; None: all. Raises `AdapterRefused`."""
    named = config.get("target_modules")
    if named == "all-linear":
        return None
    if named is None or isinstance(named, str):
        what = "has no" if named is None else "has a regular expression as its"
        raise AdapterRefused(f"{ADAPTER_CONFIG} {what} target_modules")
    return frozenset(named)


def _endings(module: str) -> Iterator[str]:
    """The name itself and all that follows one of its dots."""
    while module:
        yield module
        module = module.partition(".")[2]
