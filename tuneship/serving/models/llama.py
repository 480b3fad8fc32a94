"""Llama, Mistral and Qwen models, read from their safetensors files and optimized for many short steps.

Products are fused and there are no torch modules. The computation is that of transformers' models (tests compare logits
and tokens). Knows no sampling and no requests; `supports` says which configurations it takes, `generic` takes the
others.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tuneship.host.weight_files import WeightsFault, weight_files
from tuneship.serving.batch import FlatBatch
from tuneship.serving.kernels.integer_kernels import kernels
from tuneship.serving.kernels.layout import GROUP
from tuneship.serving.kernels.quantised import ConstantProduct, Int4Product, Int8Product
from tuneship.serving.kv_cache import CacheShape, SlotCache
from tuneship.serving.lora import Lora, Routes, Site
from tuneship.serving.models.attention import AttentionPlan
from tuneship.serving.models.linear import AS_MEASURED, Packing, Product
from tuneship.serving.models.model import ModelFacts, ModelRefused, choose_dtype
from tuneship.serving.weights import QUANTISED

# The matrix products of a layer, in order; each is a site for adapters (`lora.Site`).
QKV, OUTPUT, GATE_UP, DOWN = range(4)
# Settings that transformers has a value for where the configuration names none, each architecture
# another one.
SIZES = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("vocab_size", "max_position_embeddings"),
    }
)
# Architectures, and more settings that their configuration must contain because the default is not
# Llama's. Mistral's attention may have a sliding window, Qwen 2 has biases for queries, keys and
# values, Qwen 3 norms of the heads of queries and keys; all else is as in Llama.
KINDS: dict[str, frozenset[str]] = {
    "llama": frozenset(),
    "mistral": frozenset({"num_key_value_heads", "sliding_window"}),
    "qwen2": frozenset({"num_key_value_heads"}),
    "qwen3": frozenset({"num_key_value_heads", "head_dim"}),
}
# Settings of Llama 3.1's rotary embedding.
ROPE_LENGTH = "original_max_position_embeddings"
LLAMA3_ROPE = ("low_freq_factor", "high_freq_factor", "factor", ROPE_LENGTH)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def supports(config: Mapping[str, Any]) -> bool:
    """Whether this module can run the model: not quantized, usual biases, plain or Llama 3 rotary embeddings."""
    kind, layers = str(config.get("model_type")), config.get("layer_types") or ()
    return (
        kind in KINDS
        and KINDS[kind] | SIZES <= config.keys()
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("attention_bias")
        and not config.get("mlp_bias")
        and not config.get("use_sliding_window")
        and not config.get("quantization_config")
        and {"full_attention"}.issuperset(layers)
        and not (kind == "mistral" and layers)  # they have no window then
        and _is_known(_rope(config))
        and config.get("partial_rotary_factor") in (None, 1)
    )


@dataclass(frozen=True, slots=True)
class _LlamaLayer:
    input_norm: "_Norm"
    qkv: ConstantProduct
    qkv_bias: Tensor | None
    # Norm of the heads of queries and keys.
    heads_norm: "_Norm | None"
    output: ConstantProduct
    attention_norm: "_Norm"
    gate_up: ConstantProduct
    down: ConstantProduct


class _Norm:
    """RMS norm: x over the root of its mean square, times a gain; in float32, as in the reference.

    It is computed as sqrt(n) x / hypot(|x|, sqrt(n eps)), which equals x / sqrt(mean(x^2) + eps): three calls of torch
    where its own norm takes seven.
    """

    def __init__(self, gain: Tensor, eps: float) -> None:
        width = gain.shape[-1]
        self._gain = gain.float() * math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(width * eps))

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize [T, n], or [T, heads, n] with a gain [heads, n]; same shape."""
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.div(x, size.hypot_(self._floor)).mul_(self._gain).to(x.dtype)


class LlamaModel:
    """The weights of a model, and its forward pass over a flat batch."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        weights: str | None = None,
        packing: Packing = AS_MEASURED,
    ) -> None:
        """Read all weights, layer by layer. Raises `ModelRefused`.

        `weights`: their number format; None: float32 or bfloat16, whichever suits the model and this machine.
        """
        self._packing = packing
        files = _WeightFiles(directory)
        number_format = choose_dtype(weights, files.parameters)
        self._quantised = weights if weights in QUANTISED else None
        self._kind = str(config["model_type"])
        self._heads = _count(config, "num_attention_heads")
        self._kv_heads = _count(config, "num_key_value_heads", self._heads)
        self._hidden = _count(config, "hidden_size")
        self._dim = _count(config, "head_dim", self._hidden // self._heads)
        self._inner = _count(config, "intermediate_size")
        if self._dim % 2 or self._heads % self._kv_heads:
            raise ModelRefused(
                "head_dim or num_key_value_heads in the base model's config.json fits no attention"
            )
        self._eps = _number(config, "rms_norm_eps", 1e-6)
        layers, vocabulary = _count(config, "num_hidden_layers"), _count(config, "vocab_size")
        self.facts = ModelFacts(
            parameters=files.parameters,
            vocabulary=vocabulary,
            context_length=_count(config, "max_position_embeddings"),
            hidden_size=self._hidden,
            cache=CacheShape(layers, self._kv_heads, self._dim, number_format),
            weights=self._quantised or str(number_format).removeprefix("torch."),
        )
        if self._quantised is not None:
            self._check_groups()
        self._interleaved = torch.arange(self._dim).view(2, -1).t().flatten()
        shape = (vocabulary, self._hidden)
        tied = bool(config.get("tie_word_embeddings")) and files.are_equal(EMBEDDING, HEAD)
        # As in transformers, a tied matrix may be stored under either name.
        name = HEAD if tied and EMBEDDING not in files else EMBEDDING
        embedding = files.take(name, number_format, shape)
        self._embed: Callable[[Tensor], Tensor]
        self._head: ConstantProduct
        if self._quantised is None:
            self._embed = partial(F.embedding, weight=embedding)
            head = embedding if tied else files.take(HEAD, number_format, shape)
            self._head = Product(head, shared=tied, packing=packing)
        else:
            # 8 bits also beside 4: each row stands for one token alone, and the head's rounding
            # goes straight into the logits.
            rows = Int8Product(embedding, kernels())
            del embedding
            self._embed = rows.rows
            self._head = rows
            if not tied:
                head = files.take(HEAD, number_format, shape)
                self._head = Int8Product(head, kernels())
        self._layers = [
            self._layer(files, f"model.layers.{n}", number_format) for n in range(layers)
        ]
        self._norm = _Norm(files.take("model.norm.weight", number_format, shape[1:]), self._eps)
        self._rotation = _rotation(config, self._dim)
        has_window = self._kind == "mistral" and config["sliding_window"] is not None
        window = _count(config, "sliding_window") if has_window else None
        self._plan = AttentionPlan(self._dim**-0.5, window)
        fits = self._quantised is not None and window is None and self._dim % GROUP == 0
        self._decode = compiled.attend if fits and (compiled := kernels()) is not None else None

    def forward(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """Compute logits; see `CausalModel.forward`."""
        x = self._run_layers(batch, cache, lora, routes)
        return self._head(self._norm(x.index_select(0, batch.logit_indices))).float()

    def hidden(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """Compute hidden states; see `CausalModel.hidden`."""
        return self._norm(self._run_layers(batch, cache, lora, routes)).float()

    def _run_layers(self, batch: FlatBatch, cache: SlotCache, lora: Lora, routes: Routes) -> Tensor:
        """Compute the hidden states [T, hidden size] before the final norm."""
        cache.prepare()
        rotation = self._rotation[batch.positions].unsqueeze(1)
        rotated = self._heads + self._kv_heads  # queries and keys; values stay
        # Our kernel rotates the tokens of decoding sequences itself.
        decode, decode_layer = self._decode, None
        unrotated = 0 if decode is None else batch.decode_count
        x = self._embed(batch.tokens)
        for number, layer in enumerate(self._layers):
            site = 4 * number
            qkv = lora.multiply(site + QKV, layer.input_norm(x), routes)
            if layer.qkv_bias is not None:
                qkv.add_(layer.qkv_bias)
            heads = qkv.view(len(qkv), -1, self._dim)
            queries_keys = heads[:, :rotated]
            if layer.heads_norm is not None:
                queries_keys.copy_(layer.heads_norm(queries_keys))

            # Rotary embedding, in place and always in float32: far positions need its precision.
            if unrotated < len(heads):
                queries_keys = queries_keys[unrotated:]
                pairs = torch.view_as_complex(queries_keys.float().unflatten(-1, (-1, 2)))
                pairs.mul_(rotation[unrotated:])
                if queries_keys.dtype != torch.float32:
                    queries_keys.copy_(torch.view_as_real(pairs).flatten(-2))

            queries, keys_values = heads[:, : self._heads], heads[:, self._heads :]
            if decode is not None:
                decode_layer = partial(decode, heads, rotation, batch, scale=self._plan.scale)
            attended = cache.attend(number, queries, keys_values, batch, self._plan, decode_layer)
            attended = attended.reshape(len(qkv), -1)
            x = lora.multiply_onto(x, site + OUTPUT, attended, routes)
            gate_up = lora.multiply(site + GATE_UP, layer.attention_norm(x), routes)
            inner = F.silu(gate_up[:, : self._inner]).mul_(gate_up[:, self._inner :])
            x = lora.multiply_onto(x, site + DOWN, inner, routes)
        return x

    def _layer(self, files: "_WeightFiles", name: str, dtype: torch.dtype) -> _LlamaLayer:
        hidden, inner = self._hidden, self._inner
        query_width, key_width = self._heads * self._dim, self._kv_heads * self._dim

        def take(part: str, *shape: int) -> Tensor:
            return files.take(f"{name}.{part}", dtype, shape)

        def norm(part: str) -> _Norm:
            return _Norm(take(f"{part}_layernorm.weight", hidden), self._eps)

        def qkv(part: str, *inputs: int) -> Tensor:
            query = take(f"self_attn.q_proj.{part}", query_width, *inputs)
            key = take(f"self_attn.k_proj.{part}", key_width, *inputs)
            value = take(f"self_attn.v_proj.{part}", key_width, *inputs)
            return torch.cat(
                [query[self._order(self._heads)], key[self._order(self._kv_heads)], value]
            )

        heads_norm = None
        if self._kind == "qwen3":
            # One norm of queries and keys together; a gain of its own for each head, as they lie side by side.
            query, key = (take(f"self_attn.{part}_norm.weight", self._dim) for part in "qk")
            gains = torch.cat([query.expand(self._heads, -1), key.expand(self._kv_heads, -1)])
            heads_norm = _Norm(gains[:, self._interleaved], self._eps)
        gate, up = (take(f"mlp.{part}_proj.weight", inner, hidden) for part in ("gate", "up"))
        kinds = {
            "int8": lambda weight: Int8Product(weight, kernels()),
            "int4": lambda weight: Int4Product(weight, kernels()),
            None: partial(Product, packing=self._packing),
        }
        product: Callable[[Tensor], ConstantProduct] = kinds[self._quantised]
        return _LlamaLayer(
            input_norm=norm("input"),
            qkv=product(qkv("weight", hidden)),
            qkv_bias=qkv("bias") if self._kind == "qwen2" else None,
            heads_norm=heads_norm,
            output=product(take("self_attn.o_proj.weight", hidden, query_width)),
            attention_norm=norm("post_attention"),
            gate_up=product(torch.cat([gate, up])),
            down=product(take("mlp.down_proj.weight", hidden, inner)),
        )

    def _check_groups(self) -> None:
        """Raises `ModelRefused` where the inputs of a product fit no groups of numbers."""
        widths = {
            "hidden_size": self._hidden,
            "intermediate_size": self._inner,
            "num_attention_heads times head_dim": self._heads * self._dim,
        }
        for name, width in widths.items():
            if width % GROUP:
                raise ModelRefused(
                    f"{name} of the base model is {width}: weights in {self._quantised} need a multiple of {GROUP}"
                )

    def _order(self, heads: int) -> Tensor:
        """Order of channels that puts the two numbers rotated together side by side, as one complex number.

        Queries and keys are reordered in the same way, so their products do not change.
        """
        return (torch.arange(heads)[:, None] * self._dim + self._interleaved).flatten()

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites for adapters, in the order of the products, on which `forward` relies."""
        query, key = self._heads * self._dim, self._kv_heads * self._dim
        orders = (self._order(self._heads), self._order(self._kv_heads), None)
        sites: list[Site] = []
        for number, layer in enumerate(self._layers):
            name = f"model.layers.{number}"
            attention = tuple(f"{name}.self_attn.{part}_proj" for part in "qkv")
            sites.append(Site(attention, self._hidden, (query, key, key), orders, layer.qkv))
            output = (f"{name}.self_attn.o_proj",)
            sites.append(Site(output, query, (self._hidden,), (None,), layer.output))
            inner = (f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj")
            widths = (self._inner, self._inner)
            sites.append(Site(inner, self._hidden, widths, (None, None), layer.gate_up))
            down = (f"{name}.mlp.down_proj",)
            sites.append(Site(down, self._inner, (self._hidden,), (None,), layer.down))
        return tuple(sites)


class _WeightFiles:
    """The weight files of a directory; each tensor is read when `take` is called."""

    def __init__(self, directory: Path) -> None:
        try:
            files = weight_files(directory).files
            self._files = [safe_open(file, framework="pt") for file in files]
        except WeightsFault as fault:
            raise ModelRefused(f"the base model cannot be read: {fault}") from None
        except (OSError, SafetensorError) as error:
            raise ModelRefused(f"the weights cannot be read: {type(error).__name__}") from error
        self._at = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 (no iterator)
        self.parameters = sum(
            math.prod(file.get_slice(name).get_shape()) for name, file in self._at.items()
        )

    def __contains__(self, name: str) -> bool:
        return name in self._at

    def are_equal(self, *names: str) -> bool:
        """Whether the given tensors, ignoring missing ones, have the same numbers."""
        first, *others = (self._at[name].get_tensor(name) for name in names if name in self._at)
        return all(torch.equal(first, other) for other in others)

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor of this shape, in this number format. Raises `ModelRefused`."""
        if name not in self._at:
            raise ModelRefused(f"the base model has no tensor {name}")
        tensor = self._at[name].get_tensor(name)
        if tensor.shape != shape:
            actual, expected = (" x ".join(map(str, sizes)) for sizes in (tensor.shape, shape))
            raise ModelRefused(
                f"the base model's {name} is {actual}, its config.json says {expected}"
            )
        return tensor.to(dtype, copy=True)


def _count(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """Read a whole number above 0 from config.json. Raises `ModelRefused`."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 1:
        raise ModelRefused(f"{name} in the base model's config.json is not a whole number above 0")
    return value


def _number(config: Mapping[str, Any], name: str, default: float) -> float:
    """Read a number above 0 from config.json. Raises `ModelRefused`."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ModelRefused(f"{name} in the base model's config.json is not a number above 0")
    return float(value)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary settings: one object since transformers 5, two keys before. Raises `ModelRefused`."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ModelRefused("the rotation in the base model's config.json is not an object")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    theta = _number(rope, "rope_theta", _number(config, "rope_theta", 10_000.0))
    length = rope.get(ROPE_LENGTH) or config.get("max_position_embeddings")
    length = config.get(ROPE_LENGTH) or length
    return {**rope, "rope_type": kind, "rope_theta": theta, ROPE_LENGTH: length}


def _is_known(rope: Mapping[str, Any]) -> bool:
    """Whether these are the settings of one rotation of whole heads, for all layers, which is computed here."""
    return (
        rope["rope_type"] in ("default", "llama3")
        and rope.get("partial_rotary_factor") in (None, 1)
        and not any(isinstance(setting, dict) for setting in rope.values())
    )


def _rotation(config: Mapping[str, Any], dim: int) -> Tensor:
    """Rotation of each position as unit complex numbers [position, dim / 2], complex64."""
    rope = _rope(config)
    frequency = 1.0 / rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float) / dim)
    if rope["rope_type"] == "llama3":
        # Llama 3.1: slow rotations are slowed by `factor`, fast ones stay, those between are blended.
        low, high, factor, length = (_number(rope, name, 0.0) for name in LLAMA3_ROPE)
        turns = length * frequency / (2 * math.pi)
        share = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (share + (1 - share) / factor)
    positions = torch.arange(int(config["max_position_embeddings"]), dtype=torch.float)
    angles = torch.outer(positions, frequency)
    return torch.polar(torch.ones_like(angles), angles)
