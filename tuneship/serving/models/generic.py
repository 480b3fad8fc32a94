"""Any causal language model of transformers whose attention goes through its attention interface.

The layers are transformers' own. Their attention is replaced by that over the KV cache, and hooks on their linear
layers add the adapters' deltas; weights are packed where that is faster. Slower per step than `llama`. A model is
compared with its untouched self when it is loaded, and refused if they differ.
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
    DynamicCache,
    PreTrainedModel,
)

from tuneship.rotation import DifferentBorders, RotationByLength
from tuneship.serving.batch import FlatBatch
from tuneship.serving.kv_cache import CacheShape, SlotCache
from tuneship.serving.lora import Lora, Routes, Site
from tuneship.serving.models.attention import AttentionPlan
from tuneship.serving.models.linear import AS_MEASURED, Packing, pack_layers
from tuneship.serving.models.model import ModelFacts, ModelRefused, choose_dtype
from tuneship.serving.sequence import GenerateRequest, Sequence

_ATTENTION = "tuneship_slots"
# Transformers knows attention by one name per process; a layer's own method is the one of its model.
AttentionInterface.register(
    _ATTENTION,
    lambda module, *inputs, **options: module.tuneship_attend(module, *inputs, **options),
)
# Token ids of the comparison: the first half is a prompt prefilled in two chunks, the others are
# decoded one by one.
_PROBE = tuple(range(1, 9))
# Tokens per call of a layer that sees every token of the comparison once: only such a layer can
# take an adapter.
_EACH_TOKEN = [2, 2, 1, 1, 1, 1]


@dataclass(frozen=True, slots=True)
class _Step:
    """Input of the replaced parts of the model during a forward pass."""

    batch: FlatBatch
    cache: SlotCache
    lora: Lora
    routes: Routes


class GenericModel:
    """A transformers model with the interface of `LlamaModel`."""

    def __init__(
        self, directory: Path, weights: str | None = None, packing: Packing = AS_MEASURED
    ) -> None:
        """Load local files only, and run no code from them. Raises `ModelRefused`."""
        self._step: _Step | None = None
        # Number of tokens that the attention of each layer looks back, as seen in the comparison; None: all.
        self._windows: dict[int, int | None] = {}
        self._model = _loaded(directory, weights)
        try:
            self._rotation = RotationByLength(self._model)
            self.facts = _facts(self._model, self._rotation.border)
        except DifferentBorders as fault:
            raise ModelRefused(f"the base model cannot be served: {fault}") from None
        except Exception as error:  # a configuration without the usual names
            raise ModelRefused(
                f"the sizes of the base model are not in its configuration: {type(error).__name__}"
            ) from error
        sites: list[Site] = []
        for name in self._check(packing):
            layer: Any = self._model.get_submodule(name)
            layer.register_forward_hook(partial(self._add_deltas, len(sites)))
            widths = (int(layer.out_features),)
            sites.append(Site((name,), int(layer.in_features), widths, (None,)))
        self.sites = tuple(sites)

    def forward(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """Compute logits; see `CausalModel.forward`."""
        self._begin(batch, cache, lora, routes)
        output = self._model(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logit_indices,
        )
        return output.logits[0].float()

    def hidden(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """Compute hidden states; see `CausalModel.hidden`."""
        self._begin(batch, cache, lora, routes)
        body: nn.Module = self._model.base_model
        output = body(
            input_ids=batch.tokens[None], position_ids=batch.positions[None], use_cache=False
        )
        return output.last_hidden_state[0].float()

    def _begin(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> None:
        cache.prepare()
        self._step = _Step(batch, cache, lora, routes)
        if self._rotation.border is not None:
            self._rotation.lengths = batch.lengths()[None]

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_mask: object,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Implement transformers' attention interface: [1, heads, T, dim] in, [1, T, heads, dim] out."""
        if self._step is None or options.get("s_aux") is not None:
            raise RuntimeError("only plain causal attention inside of a step is computed here")
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self._windows[layer] = options.get("sliding_window")
        plan = AttentionPlan(
            scale=options.get("scaling") or query.shape[-1] ** -0.5,
            window=self._windows[layer],
            softcap=options.get("softcap"),
        )
        keys_values = torch.cat([key, value], dim=1)[0].transpose(0, 1)
        attended = self._step.cache.attend(
            layer, query[0].transpose(0, 1), keys_values, self._step.batch, plan
        )
        return attended[None], None

    def _add_deltas(
        self, site: int, _module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor
    ) -> None:
        """Add the adapters' deltas to the output of a linear layer, as the layer's forward hook."""
        if self._step is not None:
            x = inputs[0].flatten(0, -2)
            self._step.lora.add(site, x, output.view(-1, output.shape[-1]), self._step.routes)

    @torch.inference_mode()
    def _check(self, packing: Packing) -> list[str]:
        """Compare with the untouched model on a short text; return the names of the layers that can take adapters."""
        kind = self._model.config.model_type
        try:
            self._model.set_attn_implementation("eager")
            expected = (
                self._model(input_ids=torch.tensor([_PROBE]), use_cache=False).logits[0, -1].float()
            )
            pack_layers(self._model, packing)
            for module in self._model.modules():
                if hasattr(module, "layer_idx"):
                    module.tuneship_attend = self._attend  # type: ignore[assignment]
            self._model.set_attn_implementation(_ATTENTION)
            with _recorded_calls(self._model) as calls:
                actual = self._probe_logits()
        except Exception as error:  # whatever an unknown architecture stumbles over
            raise ModelRefused(f"{kind} models do not run here: {type(error).__name__}") from error
        tolerance = (0.1 if self._model.dtype is torch.bfloat16 else 1e-3) * float(expected.std())
        if not torch.allclose(actual.float(), expected, rtol=0, atol=tolerance):
            raise ModelRefused(f"the attention of {kind} models is not plain causal attention")

        # The text is too short to show a wrong window: the windows that the attention was given must be those of the
        # configuration, by the rule of transformers' own masks.
        config = self._model.config.get_text_config()
        window = getattr(config, "sliding_window", None)
        usual = "full_attention" if window is None else "sliding_attention"
        layers = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
        if not {"full_attention", "sliding_attention"}.issuperset(layers):
            raise ModelRefused(f"layers of {config.model_type} models are not all attention")
        windows = [window if layer == "sliding_attention" else None for layer in layers]
        if self._windows != dict(enumerate(windows)):
            raise ModelRefused(
                f"the sliding windows of {kind} models are not those of their configuration"
            )
        return [name for name, tokens in calls.items() if tokens == _EACH_TOKEN]

    def _probe_logits(self) -> Tensor:
        """Logits [vocabulary] after the probe, its second half decoded token by token."""
        cache = SlotCache.of_one(self.facts.cache, len(_PROBE))
        half = len(_PROBE) // 2
        sequence = Sequence("probe", GenerateRequest(_PROBE[:half], max_tokens=half), half, slot=0)
        no_adapters = Lora((), self.facts.cache.dtype)

        def forward(*chunks: int) -> Tensor:
            batch = FlatBatch.of([sequence], chunks)
            return self.forward(batch, cache, no_adapters, Routes((), None))

        for chunk in _EACH_TOKEN[:2]:
            forward(chunk)
            sequence.cached += chunk
        *tokens, last = _PROBE[half:]
        for token in tokens:
            sequence.append(token)
            forward()
        sequence.append(last)
        return forward()[0]


def _loaded(directory: Path, weights: str | None) -> PreTrainedModel:
    """Read the model as transformers does. Raises `ModelRefused`."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):  # no memory: only the number of parameters is needed
            skeleton = AutoModelForCausalLM.from_config(config)
        parameters = sum(tensor.numel() for tensor in skeleton.parameters())
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=choose_dtype(weights, parameters),
            local_files_only=True,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except Exception as error:  # whatever a damaged checkpoint or configuration brings about
        raise ModelRefused(
            f"transformers cannot load the base model: {type(error).__name__}"
        ) from error
    model, report = loaded
    if report["missing_keys"]:  # transformers fills them with random numbers
        raise ModelRefused(f"the base model has no tensor {min(report['missing_keys'])}")
    return model.eval()


def _facts(model: PreTrainedModel, short_tokens: int | None) -> ModelFacts:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return ModelFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        vocabulary=config.vocab_size,
        context_length=int(config.max_position_embeddings),
        hidden_size=int(config.hidden_size),
        cache=CacheShape(
            layers=config.num_hidden_layers,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            dtype=model.dtype,
        ),
        weights=str(model.dtype).removeprefix("torch."),
        short_tokens=short_tokens,
        is_recomputed=short_tokens is not None and _computes_again(model, short_tokens),
    )


def _computes_again(model: PreTrainedModel, short_tokens: int) -> bool:
    """Whether `generate` drops the KV cache when a text grows longer than `short_tokens`, as for Phi 3."""
    cache = DynamicCache()
    nothing = torch.zeros(1, 1, short_tokens, 1)
    cache.update(nothing, nothing, layer_idx=0)
    tokens = torch.zeros(1, short_tokens + 1, dtype=torch.long)
    generation: Any = model
    inputs = generation.prepare_inputs_for_generation(tokens, past_key_values=cache)
    return inputs.get("past_key_values") is None


@contextmanager
def _recorded_calls(model: PreTrainedModel) -> Iterator[dict[str, list[int]]]:
    """Record the number of tokens of every call of each linear layer that returns its product alone."""
    calls: dict[str, list[int]] = {}

    def record(name: str, _module: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        if isinstance(output, Tensor):  # a router of experts may return its choice, too
            calls.setdefault(name, []).append(inputs[0].shape[:-1].numel())

    hooks = [
        module.register_forward_hook(partial(record, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
