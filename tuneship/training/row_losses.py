"""Losses by validation row, under the base model, the tuned model and another tuned one: numbers for the gates.

A third of the rows is measured while the job trains, and so chooses its checkpoint; the others are measured here alone,
and judge it: the difference of two models needs more rows than the order of one job's checkpoints. Next:
`training_loop.py` (when), `tuneship/gates/training/row_losses.py` (what follows from them).
"""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load
from torch import Tensor, nn

from tuneship.security.sealed_files import read_plain
from tuneship.training.examples.batches import Indices, collate, micro_batches
from tuneship.training.examples.data_files import Data
from tuneship.training.learner import Learner

# With fewer validation rows, a part of them says nothing.
MIN_ROWS = 16
# More rows of each part would make the answer and its line long, and decide no better.
MAX_ROWS_OF_PART = 2_000
DIGITS = 5
MODULE_PREFIX = "base_model.model."


def drawn_parts(data: Data, seed: int) -> tuple[Indices, Indices] | None:
    """The validation rows that choose the checkpoint, and those that judge it; None if there are too few."""
    rows = data.validation_indices
    if len(rows) < MIN_ROWS:
        return None
    order = np.random.Generator(np.random.PCG64(seed)).permutation(rows)
    judging = 2 * len(order) // 3
    return np.sort(order[judging:]), order[:judging]


class MeasuredRows:
    """Measures the rows of both parts, one model after the other."""

    def __init__(
        self,
        data: Data,
        choosing: Indices,
        judging: Indices,
        max_tokens: int,
        stop: Callable[[], None],
    ) -> None:
        """`max_tokens`: of a micro-batch; `stop` is called before each one, and may raise."""
        judged = judging[:MAX_ROWS_OF_PART]
        self._rows = np.sort(np.concatenate([choosing[:MAX_ROWS_OF_PART], judged]))
        self._examples = data.validation
        self._max_tokens, self._stop = max_tokens, stop
        trained = {data.training.digests[index] for index in data.training_indices}
        digests = data.validation.digests
        self._facts: dict[str, Any] = {
            "rows": (self._rows + 1).tolist(),
            "judge": np.isin(self._rows, judged).tolist(),
            "trained_on": [digests[row] in trained for row in self._rows],
        }

    def measured(self, name: str, learner: Learner) -> None:
        """Note the losses under the model that the learner holds now."""
        losses: dict[int, float] = {}
        for part in micro_batches(self._rows, self._examples.lengths, self._max_tokens):
            self._stop()
            found = learner.row_losses(collate(self._examples, part))
            losses |= zip(part.tolist(), found, strict=True)
        values = [losses[row] for row in self._rows.tolist()]
        # A line of progress holds no value that is not finite.
        self._facts[name] = [round(one, DIGITS) if math.isfinite(one) else None for one in values]

    def facts(self, compared_model: str | None) -> dict[str, Any]:
        """All measurements, by the names of the job's metrics."""
        return {**self._facts, "compared_model": compared_model}


@contextmanager
def adapted(model: nn.Module, directory: Path, key: str | None) -> Iterator[None]:
    """Add a stored adapter to the layers of a model within the block; `key` opens sealed files.

    Its rank and its layers may differ from those of the adapter in training. Raises `OSError`, `ValueError` and
    `AttributeError` for files that do not fit, or that hold more than plain LoRA matrices: what is left out would make
    another model of it.
    """
    config: dict[str, Any] = json.loads(read_plain(directory / CONFIG_NAME, key))
    tensors = load(read_plain(directory / SAFETENSORS_WEIGHTS_NAME, key))
    others = [name for name in tensors if not name.endswith((".lora_A.weight", ".lora_B.weight"))]
    if others or config.get("use_dora") or config.get("bias", "none") != "none":
        raise ValueError("the adapter holds more than plain LoRA matrices")
    with ExitStack() as hooks:
        for name, a in tensors.items():
            if name.endswith(".lora_B.weight"):
                continue
            module = name.removesuffix(".lora_A.weight")
            plain = module.removeprefix(MODULE_PREFIX)
            rank = len(a)
            alpha = (config.get("alpha_pattern") or {}).get(plain, config["lora_alpha"])
            scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
            layer = model.get_submodule(module)
            device = next(layer.parameters()).device
            b = tensors[f"{module}.lora_B.weight"].float() * scale
            handle = layer.register_forward_hook(_addition(a.float().to(device), b.to(device)))
            hooks.callback(handle.remove)
        yield


def _addition(a: Tensor, b: Tensor) -> Callable[..., Tensor]:
    def add(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        x = inputs[0]
        # In the number format of the layer, as the adapter in training is computed.
        with torch.autocast(x.device.type, enabled=False):
            more = x.to(output.dtype) @ a.to(output.dtype).T @ b.to(output.dtype).T
        return output + more

    return add
