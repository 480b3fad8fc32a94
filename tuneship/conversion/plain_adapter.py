"""Rewrites an adapter saved by peft like a tuned one: tensors, and plain names and numbers.

peft's configurations may choose modules by regular expressions and by layers. They are followed here once, by peft's
rules, in the process that checks the adapter, and the module names that they stand for are written in their place.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tuneship.host.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tuneship.serving.adapters import (
    DEFAULT_ALPHA,
    DEFAULT_RANK,
    FOLLOWED,
    KEY,
    AdapterRefused,
    read_files,
    refuse_unsupported,
)

# Options that choose modules: resolved here, and never read by what serves.
CHOOSING = frozenset({"exclude_modules", "layers_to_transform", "layers_pattern"})
# What is written, and with float64 what is read: rarer formats would take several times the size of their file.
NUMBER_FORMATS = (torch.float32, torch.float16, torch.bfloat16)


def write_plain(source: Path, target: Path, base_model: str) -> None:
    """Write the adapter in `source` into the empty folder `target`. Raises `AdapterRefused`.

    `source` keeps only the options that are followed, so that peft, which reads it next, sees no others either.
    """
    config, tensors = read_files(source)
    refuse_unsupported(config, FOLLOWED | CHOOSING)
    followed = {name: config[name] for name in config.keys() & (FOLLOWED | CHOOSING)}
    (source / ADAPTER_CONFIG).write_text(json.dumps(followed), encoding="utf-8")
    try:
        plain = _plain_config(followed, tensors)
    except (TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
        raise AdapterRefused(
            f"{ADAPTER_CONFIG} is not understood: {type(error).__name__}"
        ) from error
    plain["base_model_name_or_path"] = base_model
    (target / ADAPTER_CONFIG).write_text(json.dumps(plain, indent=2), encoding="utf-8")
    # Without what else a header may hold, which would be parsed at each load.
    save_file(
        {name: _as_float(name, tensor) for name, tensor in tensors.items()},
        target / ADAPTER_WEIGHTS,
    )


def _as_float(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.float64:
        return tensor.float()
    if tensor.dtype not in NUMBER_FORMATS:
        found = str(tensor.dtype).removeprefix("torch.")
        known = ", ".join(str(one).removeprefix("torch.") for one in NUMBER_FORMATS)
        raise AdapterRefused(
            f"tensor {name:.200} cannot be read: its numbers are {found}, and adapters have {known} or float64"
        )
    return tensor.contiguous()


def _plain_config(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    modules: list[str] = []
    for key in tensors:
        match = KEY.fullmatch(key)
        if match is None:
            raise AdapterRefused(f"tensor {key:.200} is not a LoRA matrix of a linear layer")
        if not _is_target(match["module"], config):
            raise AdapterRefused(
                f"tensor {key:.200} is of a layer that {ADAPTER_CONFIG} leaves out"
            )
        modules.append(match["module"])
    modules = sorted(set(modules))
    if not modules:
        raise AdapterRefused("the adapter holds no tensors")
    rank, rank_pattern = _by_module(modules, config, "rank_pattern", config.get("r", DEFAULT_RANK))
    alpha, alpha_pattern = _by_module(
        modules, config, "alpha_pattern", config.get("lora_alpha", DEFAULT_ALPHA)
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": rank_pattern,
        "alpha_pattern": alpha_pattern,
        "use_rslora": bool(config.get("use_rslora")),
        "target_modules": modules,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def _by_module(
    modules: Sequence[str], config: Mapping[str, Any], option: str, default: Any
) -> tuple[Any, dict[str, Any]]:
    """The most frequent value, and the values of the other modules by name.

    Peft's rule: that of the first key that is a suffix, as a regular expression, of the module's name.
    """
    patterns = dict[str, Any](config.get(option) or {})
    values: dict[str, Any] = {}
    for module in modules:
        keys = (key for key in patterns if re.match(rf"(.*\.)?({key})$", module))
        key = next(keys, None)
        values[module] = default if key is None else patterns[key]
        if isinstance(values[module], bool) or not isinstance(values[module], int | float):
            raise TypeError
    usual = Counter(values.values()).most_common(1)[0][0]
    return usual, {module: value for module, value in values.items() if value != usual}


def _is_target(module: str, config: Mapping[str, Any]) -> bool:
    """Whether peft reads matrices of this module; peft ignores those of other modules."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    if excluded and _is_named(module, excluded):
        return False
    if targets is None:
        raise AdapterRefused(f"{ADAPTER_CONFIG} has no target_modules")
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
