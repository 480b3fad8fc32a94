"""The model that learns: a base model with one LoRA adapter, its loss and its optimizer.

Only the adapter is trained and kept. Logits are computed where the loss counts and nowhere else: in a
dialogue that is a quarter of the tokens, and with a large vocabulary logits are the largest tensor.
Knows no files of a job and no order of rows. Loads torch; next: `tuneship/training/run.py`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from tuneship.security.sealed_files import write_sealed
from tuneship.training.batches import PaddedBatch
from tuneship.training.lora import FusedLinear, Noise
from tuneship.training.packing import PackedAttention
from tuneship.training.progress_file import Reason, TrainingFailed
from tuneship.training.spec import ResolvedHyperparameters

ALL_LINEAR = "all-linear"
# Gradients are scaled down to this norm, as transformers' Trainer does it.
GRADIENT_NORM = 1.0
# Where the rank stands in a process's seed: above every seed and step.
RANK_BITS = 56

# Batches with a larger share of tokens than this go in as they are: undoing the packing costs
# too.
WORTH_PACKING = 0.9


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


class Learner:
    """One adapter in training. Every random choice follows from (seed, step), and the rank where there are several."""

    def __init__(
        self, base: PreTrainedModel, settings: ResolvedHyperparameters, rank: int = 0
    ) -> None:
        """`rank`: of this process in its job. Raises TrainingFailed(internal) when a target module does not exist."""
        self._seed = settings.seed
        self._rank = rank
        self._noise = Noise(settings.seed, rank)
        self._packing = PackedAttention.of(base)
        self.packs = self._packing is not None
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

    def learn(
        self, batches: Iterable[PaddedBatch], tokens: int, *, step: int, rate: float
    ) -> float:
        """One optimizer step over `batches`, which hold `tokens` learnt tokens; returns their mean loss.

        The step is taken whatever the loss is: whoever calls this decides about one that is not finite.
        """
        loss = self.backward(batches, tokens, step=step)
        self.take_step(rate)
        return loss.item()

    def backward(self, batches: Iterable[PaddedBatch], tokens: int, *, step: int) -> Tensor:
        """The first half of `learn`: the gradient. Returns the share of `batches` in the mean over `tokens`."""
        self.model.train()
        draws = self._seed * 1_000_003 + step + (self._rank << RANK_BITS)
        torch.manual_seed(draws)  # dropout of the base model's own
        self._noise.begin_step(step)
        loss = torch.zeros((), device=self.model.device)
        for batch in batches:
            part = self.loss(batch) / tokens
            part.backward()
            loss += part.detach()
        return loss

    def take_step(self, rate: float) -> None:
        """The other half: the optimizer's."""
        nn.utils.clip_grad_norm_(self._adapter.values(), GRADIENT_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()

    def take_gradient(self, place: Tensor) -> None:
        """Lay the gradient down in `place`, shape (trainable parameters), and forget it."""
        place.copy_(_flat([_gradient(parameter) for parameter in self._adapter.values()]))
        self._optimizer.zero_grad()

    def add_gradient(self, flat: Tensor) -> None:
        """Add what another's `take_gradient` laid down."""
        for parameter, piece in self._pieces(flat):
            parameter.grad = _gradient(parameter) + piece

    @torch.no_grad()
    def lay_down(self, place: Tensor) -> None:
        """Lay the adapter's weights down in `place`, shape (trainable parameters)."""
        place.copy_(_flat(self._adapter.values()))

    @torch.no_grad()
    def pick_up(self, flat: Tensor) -> None:
        """Take the weights that another's `lay_down` left."""
        for parameter, piece in self._pieces(flat):
            parameter.copy_(piece)

    def loss(self, batch: PaddedBatch) -> Tensor:
        """Sum over the learnt tokens, with the way back."""
        logits, targets = self._logits(batch)
        return functional.cross_entropy(logits, targets, reduction="none").sum()

    @torch.inference_mode()
    def measure(self, batch: PaddedBatch) -> TokenLoss:
        """Loss and hits without learning."""
        self.model.eval()
        logits, targets = self._logits(batch)
        loss = functional.cross_entropy(logits, targets, reduction="sum").item()
        right = int((logits.argmax(-1) == targets).sum())
        return TokenLoss(loss, right, len(targets))

    @torch.inference_mode()
    def next_logits(self, prompt: Sequence[int]) -> Tensor:
        """What follows `prompt`, shape (vocabulary)."""
        self.model.eval()
        tokens = np.array(prompt, dtype=np.int64)
        place = np.array([len(prompt) - 1])
        batch = PaddedBatch(tokens[None], place, tokens[:1], np.arange(len(prompt)))
        return self._logits(batch)[0][0]

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
    def put(self, adapter: Mapping[str, Tensor]) -> None:
        """Take these weights, as `adapter` gave them."""
        for name, parameter in self._adapter.items():
            parameter.copy_(adapter[name])

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

    def save_adapter(
        self, directory: Path, adapter: Mapping[str, Tensor], key: str | None = None
    ) -> None:
        """Write `adapter` as peft's `save_pretrained` does, which cannot seal it with a key."""
        tensors = get_peft_model_state_dict(
            self.model, state_dict=dict(adapter), save_embedding_layers=False
        )
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        content = save(whole, metadata={"format": "pt"})
        write_sealed(directory / SAFETENSORS_WEIGHTS_NAME, key, content)
        config = {**self.model.peft_config["default"].to_dict(), "inference_mode": True}
        text = json.dumps(config, default=sorted, indent=2, sort_keys=True)
        write_sealed(directory / CONFIG_NAME, key, text.encode())

    def _pieces(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each weight of the adapter with its part of `flat`, on its device."""
        parts = flat.to(self.model.device).split([p.numel() for p in self._adapter.values()])
        for parameter, part in zip(self._adapter.values(), parts, strict=True):
            yield parameter, part.view_as(parameter)

    def _logits(self, batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        """Logits of the places that are learnt, shape (places, vocabulary), and their targets."""
        where = self.model.device
        inputs, self._places = self._inputs(batch, where)
        with torch.autocast(where.type, torch.bfloat16, enabled=where.type != "cpu"):
            output = self.model(**inputs, use_cache=False)
        return output.logits[0].float(), torch.from_numpy(batch.targets).to(where)

    def _inputs(self, batch: PaddedBatch, where: torch.device) -> tuple[dict[str, Tensor], Tensor]:
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


def _flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _gradient(parameter: nn.Parameter) -> Tensor:
    """Zeros where no row came by, e.g. an expert that nothing was routed to."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _with_adapter(
    base: PreTrainedModel, settings: ResolvedHyperparameters, noise: Noise
) -> PeftModel:
    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,  # type: ignore[arg-type]
        lora_dropout=settings.lora_dropout,
        target_modules=_target_modules(base, settings.target_modules),
        task_type="CAUSAL_LM",
    )
    if base.device.type == "cpu":
        config._register_custom_module({nn.Linear: FusedLinear})  # noqa: SLF001 (peft's documented way)
    try:
        model = get_peft_model(base, config)
    except ValueError as error:  # peft names modules that some architecture cannot have tuned
        raise TrainingFailed(
            Reason.INTERNAL, f"the base model takes no adapter there: {error}"
        ) from error
    for module in model.modules():
        if isinstance(module, FusedLinear):
            module.noise = noise
    return model


def _target_modules(base: PreTrainedModel, asked: tuple[str, ...]) -> str | list[str]:
    """Peft's way to say it. The head is no target: serving computes it without adapters."""
    head = base.get_output_embeddings()
    known = {
        name.rpartition(".")[2]
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if not known:
        raise TrainingFailed(
            Reason.INTERNAL, f"{base.config.model_type} models have no linear layers to adapt"
        )
    unknown = sorted(set(asked) - known - {ALL_LINEAR})
    if unknown:
        raise TrainingFailed(
            Reason.INTERNAL,
            f"the base model has no target module {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}",
        )
    return ALL_LINEAR if ALL_LINEAR in asked else sorted(asked)
