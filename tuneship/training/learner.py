"""The model that learns: a base model with one LoRA adapter, its loss and its optimizer.

Only the adapter is trained and kept. Logits are computed where the loss counts and nowhere else: in a
dialogue that is a quarter of the tokens, and with a large vocabulary logits are the largest tensor.
Knows no files of a job and no order of rows. Loads torch; next: `tuneship/training/run.py`.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from tuneship.training.batches import Batch
from tuneship.training.lora import FusedLinear, Noise
from tuneship.training.packing import PackedAttention
from tuneship.training.progress import Reason, TrainingFailed
from tuneship.training.spec import Hyperparameters

ALL_LINEAR = "all-linear"
SMALL_MODEL = 5_000_000
"""Below so many parameters a second thread costs more than it brings."""
GRADIENT_NORM = 1.0
"""Gradients are scaled down to this norm, as transformers' Trainer does it."""

WORTH_PACKING = 0.9
"""Batches with a larger share of tokens than this go in as they are: undoing the packing costs too."""


@dataclass(frozen=True)
class TokenLoss:
    """Sums over learnt tokens."""

    loss: float
    right: int
    tokens: int

    def __add__(self, other: "TokenLoss") -> "TokenLoss":
        """Both together."""
        return TokenLoss(
            self.loss + other.loss, self.right + other.right, self.tokens + other.tokens
        )


def load_base(base_model: str) -> PreTrainedModel:
    """The base model from a directory or the local hub cache: safetensors only, no code of the model's own.

    Raises TrainingFailed(internal) naming what is wrong with it.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            base_model,
            dtype=torch.float32 if device().type == "cpu" else torch.bfloat16,
            attn_implementation="sdpa",
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, KeyError) as error:
        message = f"the base model cannot be loaded: {error}"
        raise TrainingFailed(Reason.INTERNAL, message) from error
    return cast("PreTrainedModel", cast("nn.Module", model).to(device()))


def model_directory(base_model: str) -> Path:
    """Where the files of the base model lie."""
    if Path(base_model).is_dir():
        return Path(base_model)
    return Path(str(cached_file(base_model, "config.json", local_files_only=True))).parent


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_threads(asked: int, model: nn.Module) -> int:
    """`asked`, or by the size of the model: one core is left to serving."""
    if asked:
        return asked
    size = sum(parameter.numel() for parameter in model.parameters())
    return 1 if size < SMALL_MODEL else max(1, len(os.sched_getaffinity(0)) - 1)


class Learner:
    """One adapter in training. Every random choice follows from (seed, step)."""

    def __init__(self, base: PreTrainedModel, settings: Hyperparameters) -> None:
        """Raises TrainingFailed(internal) when a target module does not exist."""
        self._seed = settings.seed
        self._noise = Noise(settings.seed)
        self._packing = PackedAttention(base) if PackedAttention.fits(base) else None
        torch.manual_seed(settings.seed)  # the start values of the adapter
        self.model = _with_adapter(base, settings, self._noise)
        self._adapter = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self.trainable_parameters = sum(p.numel() for p in self._adapter.values())
        self._places: Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._select_places)
        self._optimizer = torch.optim.AdamW(
            self._adapter.values(), lr=settings.learning_rate, weight_decay=0.0, fused=True
        )

    def learn(self, batches: Iterable[Batch], tokens: int, *, step: int, rate: float) -> float:
        """One optimizer step over `batches`, which hold `tokens` learnt tokens; returns their mean loss.

        The step is taken whatever the loss is: whoever calls this decides about one that is not finite.
        """
        self.model.train()
        torch.manual_seed(self._seed * 1_000_003 + step)  # dropout of the base model's own
        self._noise.begin_step(step)
        loss = torch.zeros((), device=self.model.device)
        for batch in batches:
            part = self._token_losses(batch).sum() / tokens
            part.backward()
            loss += part.detach()
        nn.utils.clip_grad_norm_(self._adapter.values(), GRADIENT_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    @torch.inference_mode()
    def measure(self, batch: Batch) -> TokenLoss:
        """Loss and hits without learning."""
        self.model.eval()
        logits, targets = self._logits(batch)
        loss = functional.cross_entropy(logits, targets, reduction="sum").item()
        right = int((logits.argmax(-1) == targets).sum())
        return TokenLoss(loss, right, len(targets))

    def adapter(self) -> dict[str, Tensor]:
        """A copy of the adapter's weights, by the names of the model's parameters."""
        return {name: parameter.detach().clone() for name, parameter in self._adapter.items()}

    def state(self) -> dict[str, Tensor]:
        """Adapter and optimizer: with the step all that the next step depends on."""
        tensors = {f"adapter/{name}": value for name, value in self.adapter().items()}
        for name, parameter in self._adapter.items():
            for key, value in self._optimizer.state[parameter].items():
                tensors[f"optimizer/{key}/{name}"] = value
        return tensors

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Return to what `state` gave."""
        for name, parameter in self._adapter.items():
            parameter.copy_(tensors[f"adapter/{name}"])
        for key, value in tensors.items():
            if key.startswith("optimizer/"):
                _, quantity, name = key.split("/", 2)
                parameter = self._adapter[name]
                place = value if quantity == "step" else value.to(parameter.device)
                self._optimizer.state[parameter][quantity] = place.clone()

    def save_adapter(self, directory: Path, adapter: Mapping[str, Tensor]) -> None:
        """Write `adapter` as peft does, without its page of boilerplate."""
        self.model.save_pretrained(
            str(directory), state_dict=dict(adapter), save_embedding_layers=False
        )
        (directory / "README.md").unlink(missing_ok=True)

    def _token_losses(self, batch: Batch) -> Tensor:
        logits, targets = self._logits(batch)
        return functional.cross_entropy(logits, targets, reduction="none")

    def _logits(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits of the places that are learnt, shape (places, vocabulary), and their targets."""
        where = self.model.device
        inputs, self._places = self._inputs(batch, where)
        with torch.autocast(where.type, torch.bfloat16, enabled=where.type != "cpu"):
            output = self.model(**inputs, use_cache=False)
        return output.logits[0].float(), torch.from_numpy(batch.targets).to(where)

    def _inputs(self, batch: Batch, where: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """What the model reads, and the places in its flattened form."""
        if self._packing is not None:
            if batch.filled.size < WORTH_PACKING * batch.tokens.size:
                return self._packing.pack(batch, where)
            self._packing.pause()
        tokens = torch.from_numpy(batch.tokens).to(where)
        return {"input_ids": tokens}, torch.from_numpy(batch.places).to(where)

    def _select_places(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
        """Before the head: of (rows, width, hidden) keep (1, places, hidden)."""
        hidden: Tensor = arguments[0]
        return (hidden.flatten(0, 1)[self._places].unsqueeze(0),)


def _with_adapter(base: PreTrainedModel, settings: Hyperparameters, noise: Noise) -> PeftModel:
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=settings.lora_dropout,
        target_modules=_target_modules(base, settings.target_modules),
        task_type="CAUSAL_LM",
    )
    if base.device.type == "cpu":
        config._register_custom_module({nn.Linear: FusedLinear})  # noqa: SLF001 (peft's documented way)
    model = get_peft_model(base, config)
    for module in model.modules():
        if isinstance(module, FusedLinear):
            module.noise = noise
    return model


def _target_modules(base: nn.Module, asked: tuple[str, ...]) -> str | list[str]:
    if ALL_LINEAR in asked:
        return ALL_LINEAR
    known = {
        name.rpartition(".")[2]
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear)
    }
    unknown = sorted(set(asked) - known)
    if unknown:
        raise TrainingFailed(
            Reason.INTERNAL,
            f"the base model has no target module {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}",
        )
    return sorted(asked)
