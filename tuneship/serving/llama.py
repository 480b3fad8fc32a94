"""Llama from its safetensors files, written for many short steps: fused products, no masks, no modules.

The computation is that of transformers' LlamaForCausalLM (a test compares the logits). Knows no sampling and no
requests; `supports` says which configurations it takes, `generic` takes the others.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tuneship.serving.batch import Batch
from tuneship.serving.cache import CacheShape, Look, SlotCache
from tuneship.serving.lora import Lora, Routes, Site
from tuneship.serving.model import ModelFacts, ModelRefused, choose_dtype
from tuneship.serving.product import Product

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""The matrix products of a layer, in order; each is a site for adapters."""


def supports(config: Mapping[str, Any]) -> bool:
    """Plain Llama: no biases, no quantisation, the rotary embedding as it is or stretched as in Llama 3."""
    return (
        config.get("model_type") == "llama"
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias")
        and not config.get("mlp_bias")
        and not config.get("quantization_config")
        and _rope(config)["rope_type"] in ("default", "llama3")
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: "_Norm"
    qkv: Product
    output: Product
    attention_norm: "_Norm"
    gate_up: Product
    down: Product


class _Norm:
    """x over the root of its mean square, times a gain; in float32, as the reference does.

    x / sqrt(mean(x^2) + eps) is sqrt(n) x / hypot(|x|, sqrt(n eps)): three of torch's functions where its own norm
    takes seven.
    """

    def __init__(self, gain: Tensor, eps: float) -> None:
        self._gain = gain.float() * math.sqrt(len(gain))
        self._floor = torch.tensor(math.sqrt(len(gain) * eps))

    def __call__(self, x: Tensor) -> Tensor:
        """For [T, n] the same."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, size.hypot_(self._floor)).mul_(self._gain).to(x.dtype)


class LlamaModel:
    """Weights, and one forward pass over a flat batch."""

    def __init__(self, directory: Path, config: Mapping[str, Any], dtype: str = "auto") -> None:
        """Reads all weights; raises `ModelRefused`."""
        weights = _Weights(directory)
        number_format = choose_dtype(dtype, weights.parameters)
        self._heads = int(config["num_attention_heads"])
        self._kv_heads = int(config.get("num_key_value_heads") or self._heads)
        self._hidden = int(config["hidden_size"])
        self._dim = int(config.get("head_dim") or self._hidden // self._heads)
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        self._inner = int(config["intermediate_size"])
        layers = int(config["num_hidden_layers"])
        self.facts = ModelFacts(
            parameters=weights.parameters,
            vocabulary=int(config["vocab_size"]),
            context_length=int(config["max_position_embeddings"]),
            cache=CacheShape(layers, self._kv_heads, self._dim, number_format),
        )
        self._interleaved = torch.arange(self._dim).view(2, -1).t().flatten()
        self._embedding = weights.take("model.embed_tokens.weight", number_format)
        self._layers = [
            self._layer(weights, f"model.layers.{n}", number_format) for n in range(layers)
        ]
        self._norm = _Norm(weights.take("model.norm.weight", number_format), self._eps)
        tied = config.get("tie_word_embeddings", False)
        head = self._embedding if tied else weights.take("lm_head.weight", number_format)
        self._head = Product(head, shared=tied)
        self._rotation = _rotation(config, self._dim)
        self._look = Look(self._dim**-0.5)
        self.sites = tuple(self._sites())

    def forward(self, batch: Batch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """See `Model.forward`."""
        cache.prepare()
        rotation = self._rotation[batch.positions].unsqueeze(1)
        x = F.embedding(batch.tokens, self._embedding)
        for number, layer in enumerate(self._layers):
            site = 4 * number
            qkv = lora.multiply(site + QKV, layer.input_norm(x), routes)
            attended = self._attend(number, qkv, rotation, batch, cache)
            x = lora.multiply_onto(x, site + OUTPUT, attended, routes)
            gate_up = lora.multiply(site + GATE_UP, layer.attention_norm(x), routes)
            inner = F.silu(gate_up[:, : self._inner]).mul_(gate_up[:, self._inner :])
            x = lora.multiply_onto(x, site + DOWN, inner, routes)
        return self._head(self._norm(x.index_select(0, batch.last))).float()

    def _attend(
        self, number: int, qkv: Tensor, rotation: Tensor, batch: Batch, cache: SlotCache
    ) -> Tensor:
        heads = qkv.view(len(qkv), -1, self._dim)
        _rotate(heads[:, : self._heads + self._kv_heads], rotation)
        attended = cache.attend(
            number, heads[:, : self._heads], heads[:, self._heads :], batch, self._look
        )
        return attended.reshape(len(qkv), -1)

    def _layer(self, weights: "_Weights", name: str, dtype: torch.dtype) -> _Layer:
        def take(part: str) -> Tensor:
            return weights.take(f"{name}.{part}.weight", dtype)

        query = take("self_attn.q_proj")[self._order(self._heads)]
        key = take("self_attn.k_proj")[self._order(self._kv_heads)]
        return _Layer(
            input_norm=_Norm(take("input_layernorm"), self._eps),
            qkv=Product(torch.cat([query, key, take("self_attn.v_proj")])),
            output=Product(take("self_attn.o_proj")),
            attention_norm=_Norm(take("post_attention_layernorm"), self._eps),
            gate_up=Product(torch.cat([take("mlp.gate_proj"), take("mlp.up_proj")])),
            down=Product(take("mlp.down_proj")),
        )

    def _order(self, heads: int) -> Tensor:
        """Within each head, bring the two numbers that rotate together side by side: they become one complex number.

        Queries and keys are reordered alike, so their products stay what they were.
        """
        return (torch.arange(heads)[:, None] * self._dim + self._interleaved).flatten()

    def _sites(self) -> Iterator[Site]:
        query, key = self._heads * self._dim, self._kv_heads * self._dim
        orders = (self._order(self._heads), self._order(self._kv_heads), None)
        for number, layer in enumerate(self._layers):
            name = f"model.layers.{number}"
            attention = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
            yield Site(attention, self._hidden, (query, key, key), orders, layer.qkv)
            output = (f"{name}.self_attn.o_proj",)
            yield Site(output, query, (self._hidden,), (None,), layer.output)
            inner = (f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
            widths = (self._inner, self._inner)
            yield Site(inner, self._hidden, widths, (None, None), layer.gate_up)
            down = (f"{name}.mlp.down_proj",)
            yield Site(down, self._inner, (self._hidden,), (None,), layer.down)


class _Weights:
    """The safetensors files of a directory; a tensor is read when it is taken."""

    def __init__(self, directory: Path) -> None:
        files = sorted(directory.glob("*.safetensors"))
        try:
            self._files = [safe_open(file, framework="pt") for file in files]
        except (OSError, SafetensorError) as error:
            raise ModelRefused(f"the weights cannot be read: {type(error).__name__}") from error
        self._at = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (no iterator)
        self.parameters = sum(
            math.prod(file.get_slice(name).get_shape()) for name, file in self._at.items()
        )

    def take(self, name: str, dtype: torch.dtype) -> Tensor:
        """A copy in the number format asked for."""
        if name not in self._at:
            raise ModelRefused(f"the base model has no tensor {name}")
        return self._at[name].get_tensor(name).to(dtype, copy=True)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings: one object since transformers 5, two keys before."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    return {**rope, "rope_type": kind, "rope_theta": float(theta)}


def _rotation(config: Mapping[str, Any], dim: int) -> Tensor:
    """[position, dim / 2] unit complex numbers, complex64."""
    rope = _rope(config)
    frequency = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    if rope["rope_type"] == "llama3":
        frequency = _stretched(frequency, rope)
    positions = torch.arange(int(config["max_position_embeddings"]), dtype=torch.float)
    angles = torch.outer(positions, frequency)
    return torch.polar(torch.ones_like(angles), angles)


def _stretched(frequency: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Llama 3.1: slow rotations are slowed by `factor`, fast ones stay, those between are blended."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (share + (1 - share) / rope["factor"])


def _rotate(heads: Tensor, rotation: Tensor) -> None:
    """Turn heads [T, heads, dim] in place by rotation [T, 1, dim / 2]; always computed in float32."""
    pairs = torch.view_as_complex(heads.float().unflatten(-1, (-1, 2)))
    pairs.mul_(rotation)
    if heads.dtype != torch.float32:
        heads.copy_(torch.view_as_real(pairs).flatten(-2))
