"""Any causal language model of transformers whose attention goes through its attention interface.

The layers are transformers' own; only their attention is replaced by the slot cache's, and their linear layers are
watched so that adapters can add to them, with weights laid out where that is faster. Slower per step than `llama`, and
checked against the untouched model when it is loaded: what does not agree is refused.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from tuneship.serving.batch import FlatBatch
from tuneship.serving.kv_cache import AttentionPlan, CacheShape, SlotCache
from tuneship.serving.linear import lay_out_layers
from tuneship.serving.lora import Lora, Routes, Site
from tuneship.serving.model import ModelFacts, ModelRefused, choose_dtype
from tuneship.serving.sequence import GenerateRequest, Sequence

_ATTENTION = "tuneship_slots"
# Token ids of the trial run: the first half comes as a prompt in two parts, the others one by
# one.
_PROBE = tuple(range(1, 9))
# Tokens per call of a layer that sees every token of the trial once: there an adapter can follow.
_EACH_TOKEN = [2, 2, 1, 1, 1, 1]


@dataclass(frozen=True, slots=True)
class _Step:
    """What the replaced parts of the model need while it runs."""

    batch: FlatBatch
    cache: SlotCache
    lora: Lora
    routes: Routes


class GenericModel:
    """A transformers model behind the same interface as `LlamaModel`."""

    def __init__(self, directory: Path, dtype: str = "auto") -> None:
        """Loads local files only and never runs code from them. Raises `ModelRefused`."""
        self._step: _Step | None = None
        self._windows: dict[int, int | None] = {}
        """By layer, how many tokens its attention looks back; None: all. Seen in the trial."""
        try:
            config = AutoConfig.from_pretrained(directory, local_files_only=True)
            self._model = _load(directory, config, dtype)
            self.facts = _facts(self._model)
        except Exception as error:  # whatever a damaged checkpoint or configuration brings about
            raise ModelRefused(
                f"transformers cannot load the base model: {type(error).__name__}"
            ) from error
        self.sites: tuple[Site, ...] = ()
        self._prove()
        for number, site in enumerate(self.sites):
            self._model.get_submodule(site.modules[0]).register_forward_hook(
                partial(self._adapt, number)
            )

    def forward(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """See `Model.forward`."""
        cache.prepare()
        self._step = _Step(batch, cache, lora, routes)
        output = self._model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.last,
        )
        return output.logits[0].float()

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_mask: object,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """The attention interface: [1, heads, T, dim] in, [1, T, heads, dim] out. The cache knows who sees whom."""
        if self._step is None or options.get("s_aux") is not None:
            raise RuntimeError("only plain causal attention inside of a step is computed here")
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self._windows[layer] = options.get("sliding_window")
        look = AttentionPlan(
            scale=options.get("scaling") or query.shape[-1] ** -0.5,
            window=self._windows[layer],
            softcap=options.get("softcap"),
        )
        keys_values = torch.cat([key, value], dim=1)[0].transpose(0, 1)
        attended = self._step.cache.attend(
            layer, query[0].transpose(0, 1), keys_values, self._step.batch, look
        )
        return attended[None], None

    def _adapt(
        self, site: int, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        """Forward hook of a linear layer: add the adapters' deltas to its output."""
        if self._step is not None:
            x = inputs[0].flatten(0, -2)
            self._step.lora.add(site, x, output.view(-1, output.shape[-1]), self._step.routes)

    @torch.inference_mode()
    def _prove(self) -> None:
        """A short text as prompt and tokens: compare with the untouched model, see which layers can take adapters."""
        kind = self._model.config.model_type
        try:
            self._model.set_attn_implementation("eager")
            expected = (
                self._model(input_ids=torch.tensor([_PROBE]), use_cache=False).logits[0, -1].float()
            )
            lay_out_layers(self._model)
            AttentionInterface.register(_ATTENTION, self._attend)
            self._model.set_attn_implementation(_ATTENTION)
            with _watched(self._model) as calls:
                actual = self._trial()
        except Exception as error:  # whatever an unknown architecture stumbles over
            raise ModelRefused(f"{kind} models do not run here: {type(error).__name__}") from error
        tolerance = (0.1 if self._model.dtype is torch.bfloat16 else 1e-3) * float(expected.std())
        if not torch.allclose(actual.float(), expected, rtol=0, atol=tolerance):
            raise ModelRefused(f"the attention of {kind} models is not plain causal attention")
        if self._windows != _windows_of(self._model.config.get_text_config()):
            raise ModelRefused(
                f"where {kind} models look back less than the whole text is not clear"
            )
        self.sites = tuple(
            _site(self._model, name) for name, rows in calls.items() if rows == _EACH_TOKEN
        )

    def _trial(self) -> Tensor:
        """Logits after the probe, its second half token by token."""
        cache = SlotCache(self.facts.cache, rows=1, length=len(_PROBE))
        cache.resize(1, len(_PROBE))
        half = len(_PROBE) // 2
        sequence = Sequence("probe", GenerateRequest(_PROBE[:half], max_tokens=half), half, row=0)
        nothing = Lora((), self.facts.cache.dtype)

        def forward(*parts: int) -> Tensor:
            return self.forward(FlatBatch.of([sequence], parts), cache, nothing, Routes((), None))

        for part in _EACH_TOKEN[:2]:
            forward(part)
            sequence.cached += part
        *tokens, last = _PROBE[half:]
        for token in tokens:
            sequence.append(token)
            forward()
        sequence.append(last)
        return forward()[0]


def _load(directory: Path, config: PreTrainedConfig, dtype: str) -> PreTrainedModel:
    with torch.device("meta"):
        parameters = sum(
            tensor.numel() for tensor in AutoModelForCausalLM.from_config(config).parameters()
        )
    return AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=choose_dtype(dtype, parameters),
        local_files_only=True,
        attn_implementation="eager",
    ).eval()


def _facts(model: PreTrainedModel) -> ModelFacts:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return ModelFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=config.vocab_size,
        context_length=int(config.max_position_embeddings),
        cache=CacheShape(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
        ),
    )


def _windows_of(config: PreTrainedConfig) -> dict[int, int | None]:
    """By layer, how many tokens its attention looks back, as transformers' masks have it."""
    window = getattr(config, "sliding_window", None)
    usual = "full_attention" if window is None else "sliding_attention"
    kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
    if not {"full_attention", "sliding_attention"}.issuperset(kinds):
        raise ModelRefused(f"layers of {config.model_type} models are not all attention")
    return {
        layer: window if kind == "sliding_attention" else None for layer, kind in enumerate(kinds)
    }


@contextmanager
def _watched(model: PreTrainedModel) -> Iterator[dict[str, list[int]]]:
    """Collects for each linear layer how many tokens every call brought."""
    calls: dict[str, list[int]] = {}
    hooks = [
        module.register_forward_hook(
            lambda _module, inputs, _output, name=name: calls.setdefault(name, []).append(
                inputs[0].shape[:-1].numel()
            )
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _site(model: PreTrainedModel, name: str) -> Site:
    module = model.get_submodule(name)
    return Site((name,), int(module.in_features), (int(module.out_features),), (None,))  # type: ignore[arg-type]
