"""The model in training: a base model with one LoRA adapter and its optimizer.

Only the adapter is trained and kept. Logits are computed for target tokens alone: in a dialogue those are a quarter of
the tokens, and with a large vocabulary logits are the largest tensor. What the loss is, an `Objective` decides. Knows
no files of a job and no order of rows. Loads torch; next: `objective.py`, `training_loop.py`.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save
from torch import Tensor, nn
from transformers import PreTrainedModel

from tuneship.rotation import DifferentBorders, RotationByLength
from tuneship.security.sealed_files import write_sealed
from tuneship.training.device import needs_autocast
from tuneship.training.examples.batches import PaddedBatch
from tuneship.training.examples.packing import PackedAttention
from tuneship.training.greedy import greedy_logits
from tuneship.training.lora import FusedLinear, Noise
from tuneship.training.objective import Objective, Totals
from tuneship.training.progress_file import Reason, TrainingFailed
from tuneship.training.spec import ResolvedHyperparameters

ALL_LINEAR = "all-linear"
# Gradients are scaled down to this norm, as transformers' Trainer does it.
MAX_GRADIENT_NORM = 1.0
# The bits of a process's seed above this one hold its rank, out of reach of every seed and step.
RANK_SHIFT_BITS = 56
# Batches with less padding than a tenth go in as rectangles: undoing the packing costs too.
PACKED_BELOW_SHARE = 0.9


class Learner:
    """Trains one adapter.

    Every random choice follows from the seed, the step and, where several processes train together, the rank.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        settings: ResolvedHyperparameters,
        objective: Objective,
        rank: int = 0,
    ) -> None:
        """`rank`: the number of this process in its job.

        Raises TrainingFailed(internal) when a target module does not exist, or the model cannot be trained.
        """
        self.objective = objective
        self._seed = settings.seed
        self._rank = rank
        self._noise = Noise(settings.seed, rank)
        try:
            self._rotation = RotationByLength(base)
        except DifferentBorders as fault:
            raise TrainingFailed(
                Reason.INTERNAL, f"the base model cannot be used: {fault}"
            ) from None
        self._packing = PackedAttention.for_model(base)
        self.packs = self._packing is not None
        self._autocasts = needs_autocast(base.device, base.dtype)
        # peft draws the first weights of the adapter from torch's global generator.
        torch.manual_seed(settings.seed)
        self.model = _add_adapter(base, settings, self._noise)
        self._adapter = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self.trainable_parameters = sum(p.numel() for p in self._adapter.values())
        self._logit_positions: Tensor | None = None
        self.model.get_output_embeddings().register_forward_pre_hook(self._select_positions)
        self._optimizer = torch.optim.AdamW(
            self._adapter.values(), lr=settings.learning_rate, weight_decay=0.0, fused=True
        )

    def learn(self, batches: Iterable[PaddedBatch], terms: int, *, step: int, rate: float) -> float:
        """Take one optimizer step over `batches`, whose loss has `terms` terms; returns their mean.

        The step is taken whatever the loss is: the caller decides about one that is not finite.
        """
        loss = self.backward(batches, terms, step=step)
        self.optimizer_step(rate)
        return loss.item()

    def backward(self, batches: Iterable[PaddedBatch], terms: int, *, step: int) -> Tensor:
        """Accumulate the gradient of a step. Returns the summed loss of `batches` divided by `terms`."""
        self.model.train()
        # For dropout layers of the base model's own; the adapter's dropout draws from `_noise`.
        torch.manual_seed(self._seed * 1_000_003 + step + (self._rank << RANK_SHIFT_BITS))
        self._noise.begin_step(step)
        loss = torch.zeros((), device=self.model.device)
        for batch in batches:
            part = self.loss(batch) / terms
            part.backward()
            loss += part.detach()
        return loss

    def optimizer_step(self, rate: float) -> None:
        """Clip the accumulated gradient, take the optimizer step and forget the gradient."""
        nn.utils.clip_grad_norm_(self._adapter.values(), MAX_GRADIENT_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()

    def move_gradient_to(self, flat: Tensor) -> None:
        """Move the gradient into `flat`, shape (trainable parameters), and clear it."""
        flat.copy_(_flatten([_gradient(parameter) for parameter in self._adapter.values()]))
        self._optimizer.zero_grad()

    def add_gradient(self, flat: Tensor) -> None:
        """Add a gradient that another process wrote with `move_gradient_to`."""
        for parameter, piece in self._pieces(flat):
            parameter.grad = _gradient(parameter) + piece

    @torch.no_grad()
    def copy_weights_to(self, flat: Tensor) -> None:
        """Write the adapter's weights into `flat`, shape (trainable parameters)."""
        flat.copy_(_flatten(self._adapter.values()))

    @torch.no_grad()
    def copy_weights_from(self, flat: Tensor) -> None:
        """Take the weights that another process wrote with `copy_weights_to`."""
        for parameter, piece in self._pieces(flat):
            parameter.copy_(piece)

    def loss(self, batch: PaddedBatch) -> Tensor:
        """Summed loss of a micro-batch; keeps the graph for backward."""
        return self.objective.loss(self._logits(batch), batch)

    @torch.inference_mode()
    def evaluate(self, batch: PaddedBatch) -> Totals:
        """Compute the objective's sums over a micro-batch, without learning from it."""
        self.model.eval()
        return self.objective.evaluate(self._logits(batch), batch)

    @torch.inference_mode()
    def row_losses(self, batch: PaddedBatch) -> list[float]:
        """The loss of each row of a micro-batch, without learning."""
        self.model.eval()
        return self.objective.row_losses(self._logits(batch), batch)

    def greedy_logits(self, prompt: Sequence[int], count: int) -> Tensor:
        """Logits of the first `count` greedy tokens after `prompt`, shape (count, vocabulary), in float32."""
        self.model.eval()
        if self._packing:
            self._packing.disable()
        device = self.model.device
        self._logit_positions = torch.tensor([-1], device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._autocasts):
            return greedy_logits(self.model, prompt, count)

    def adapter(self) -> dict[str, Tensor]:
        """A copy of the adapter's weights, by the names of the model's parameters."""
        return {name: parameter.detach().clone() for name, parameter in self._adapter.items()}

    def state(self) -> dict[str, Tensor]:
        """Adapter and optimizer: all that the next step depends on, besides its number."""
        tensors = {f"adapter/{name}": value for name, value in self.adapter().items()}
        moments = self._optimizer.state_dict()["state"]
        for number, name in enumerate(self._adapter):
            # An expert that no token was routed to has no state yet.
            for key, value in moments.get(number, {}).items():
                tensors[f"optimizer/{key}/{name}"] = value
        return tensors

    @torch.no_grad()
    def clear_adapter(self) -> None:
        """Set all weights of the adapter to zero, which leaves the base model."""
        for parameter in self._adapter.values():
            parameter.zero_()

    @torch.no_grad()
    def load_adapter(self, adapter: Mapping[str, Tensor]) -> None:
        """Load weights that `adapter` returned."""
        for name, parameter in self._adapter.items():
            parameter.copy_(adapter[name])

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Return to a state that `state` returned, perhaps on another device."""
        numbers: dict[str, int] = {}
        for number, (name, parameter) in enumerate(self._adapter.items()):
            parameter.copy_(tensors[f"adapter/{name}"])
            numbers[name] = number
        moments: defaultdict[int, dict[str, Tensor]] = defaultdict(dict)
        for key, value in tensors.items():
            if key.startswith("optimizer/"):
                _, quantity, name = key.split("/", 2)
                # A copy: the optimizer would go on in the caller's tensors.
                moments[numbers[name]][quantity] = value.clone()
        # torch puts each quantity on the device where it belongs; on a GPU that goes for the step counter, too.
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})

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
        """Each weight of the adapter with its piece of `flat`, on its device."""
        parts = flat.to(self.model.device).split([p.numel() for p in self._adapter.values()])
        for parameter, part in zip(self._adapter.values(), parts, strict=True):
            yield parameter, part.view_as(parameter)

    def _logits(self, batch: PaddedBatch) -> Tensor:
        """Logits at the batch's `logit_positions`, shape (positions, vocabulary), in float32."""
        device = self.model.device
        if self._packing and len(batch.token_positions) < PACKED_BELOW_SHARE * batch.tokens.size:
            inputs, self._logit_positions = self._packing.pack(batch, device)
            lengths = batch.row_lengths[batch.token_positions // batch.tokens.shape[1]][None]
        else:
            if self._packing:
                self._packing.disable()
            inputs = {"input_ids": torch.from_numpy(batch.tokens).to(device)}
            self._logit_positions = torch.from_numpy(batch.logit_positions).to(device)
            lengths = batch.row_lengths[:, None]
        if self._rotation.border is not None:
            self._rotation.lengths = torch.from_numpy(lengths).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._autocasts):
            output = self.model(**inputs, use_cache=False)
        self._rotation.lengths = None
        return output.logits[0].float()

    def _select_positions(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Tensor]:
        """Cut the head's input from (rows, width, hidden) to (1, positions, hidden)."""
        hidden: Tensor = arguments[0]
        return (hidden.flatten(0, 1)[self._logit_positions].unsqueeze(0),)


def _flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The parameter's gradient; zeros if no row used it, e.g. an expert without a token."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _add_adapter(
    base: PreTrainedModel, settings: ResolvedHyperparameters, noise: Noise
) -> PeftModel:
    """Wrap `base` with a fresh adapter. Raises TrainingFailed(internal) where peft or the model allows none."""
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


def _target_modules(base: PreTrainedModel, requested: tuple[str, ...]) -> str | list[str]:
    """The requested modules in the form of peft's configuration. Raises TrainingFailed(internal) for an unknown one."""
    # The head is no target: serving computes it without adapters.
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
    unknown = sorted(set(requested) - known - {ALL_LINEAR})
    if unknown:
        raise TrainingFailed(
            Reason.INTERNAL,
            f"the base model has no target module {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known))}",
        )
    return ALL_LINEAR if ALL_LINEAR in requested else sorted(requested)
