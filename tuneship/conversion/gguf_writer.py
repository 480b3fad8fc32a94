"""Writes a model of transformers as a GGUF file, as llama.cpp's own converter does.

The architectures are those whose files `models add` reads back (`gguf_header.py`). Whatever has no place in such a file
is refused by name: llama.cpp would leave it out and answer otherwise.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tuneship.conversion.gguf_header import LAYER_TENSORS, ROPE_FACTORS, GgufRefused
from tuneship.conversion.gguf_model import rope_factors
from tuneship.conversion.side_files import text_format
from tuneship.conversion.template_texts import portable_source
from tuneship.prompts.template import PromptTemplate

# llama.cpp's name of each kind of model that is written.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
IN_A_LAYER = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# How a byte-level tokenizer cuts text before it joins bytes: the steps before its last one, by llama.cpp's names.
DIGITS = {"type": "Digits", "individual_digits": True}
QWEN2_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_CUT = QWEN2_CUT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def write_model(
    model: PreTrainedModel, base: Path, template: PromptTemplate, file: Path, about: dict[str, Any]
) -> None:
    """Write a model in float32 with the tokenizer of its base. Raises `GgufRefused`, and `OSError` for a full disk.

    `about`: `gguf_type` for the matrices, `name` and `licence` for the header.
    """
    kind = _architecture(model)
    tokens = _Vocabulary(base, int(model.config.get_text_config().vocab_size))
    # A head that is the embedding itself is not stored a second time.
    shared = {"lm_head.weight"} if model.config.tie_word_embeddings else set[str]()
    tensors = {
        _name(name, kind): (name, tensor)
        for name, tensor in model.state_dict().items()
        if name not in shared
    }
    writer = gguf.GGUFWriter(file, kind)
    writer.add_name(about["name"])
    if about["licence"]:
        writer.add_license(about["licence"])
    _add_settings(writer, model.config, kind)
    tokens.add_to(writer, template)
    wanted = gguf.GGMLQuantizationType[about["gguf_type"].upper()]
    for target, (name, tensor) in sorted(tensors.items()):
        _add_tensor(writer, target, _reordered(name, tensor, model.config, kind), wanted)
    rope: Any = model.config.rope_parameters or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor(ROPE_FACTORS, rope_factors(rope, _head_size(model.config)).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture(model: PreTrainedModel) -> str:
    config: Any = model.config
    kind = ARCHITECTURES.get(config.model_type)
    if kind is None:
        raise GgufRefused(
            f"{config.model_type} models are not written as GGUF files: those of {', '.join(ARCHITECTURES)} are"
        )
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise GgufRefused("its attention has a sliding window, which llama.cpp leaves out")
    scaling = (config.rope_parameters or {}).get("rope_type", "default")
    if scaling not in ("default", "llama3"):
        raise GgufRefused(f"its rotary embedding is scaled by {scaling}, which is not written")
    return kind


def _name(name: str, kind: str) -> str:
    """The name of a tensor in the file. Raises `GgufRefused` for one that llama.cpp does not know."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    found = LAYER.fullmatch(name)
    own = f"{IN_A_LAYER.get(found[2])}.{found[3]}" if found else ""
    if found is None or own not in LAYER_TENSORS[kind]:
        raise GgufRefused(f"its tensor {name} has no place in a GGUF file of its architecture")
    return f"blk.{found[1]}.{own}"


def _reordered(name: str, tensor: Tensor, config: Any, kind: str) -> Tensor:
    """Llama's heads turn neighbouring numbers in llama.cpp, and the two halves of a head in transformers."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    part = name.split(".")[-2]
    if kind != "llama" or part not in heads:
        return tensor
    shape = (heads[part], 2, -1, *tensor.shape[1:])
    return tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)


def _add_tensor(writer: Any, name: str, tensor: Tensor, wanted: Any) -> None:
    array = tensor.detach().float().contiguous().numpy()
    if tensor.dim() == 1:  # norms and biases are few and stay as they are
        writer.add_tensor(name, array)
        return
    if np.abs(array).max(initial=0) > torch.finfo(torch.float16).max:
        raise GgufRefused(f"its tensor {name} holds numbers that are too large for 16 bits")
    # A row that is no multiple of a block cannot be quantised; llama.cpp keeps it in 16 bits, too.
    fits = array.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0
    chosen = wanted if fits else gguf.GGMLQuantizationType.F16
    writer.add_tensor(name, gguf.quants.quantize(array, chosen), raw_dtype=chosen)


def _head_size(config: Any) -> int:
    size = getattr(config, "head_dim", None)
    return int(size or config.hidden_size // config.num_attention_heads)


def _add_settings(writer: Any, config: Any, kind: str) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base((config.rope_parameters or {}).get("rope_theta", 10000.0))
    writer.add_vocab_size(config.vocab_size)
    size = _head_size(config)
    if kind != "qwen3":
        writer.add_rope_dimension_count(size)
    if size != config.hidden_size // config.num_attention_heads or kind == "qwen3":
        writer.add_key_length(size)
        writer.add_value_length(size)


class _Vocabulary:
    """The tokenizer of a base model in llama.cpp's terms."""

    def __init__(self, base: Path, size: int) -> None:
        """Raises `GgufRefused` for a tokenizer that llama.cpp would read otherwise."""
        rules: dict[str, Any] = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
        self._base = base
        self._model: dict[str, Any] = rules["model"]
        self.cut = _cut_of(rules)
        known = [*self._model["vocab"].values(), *(added["id"] for added in rules["added_tokens"])]
        if max(known) >= size:
            raise GgufRefused("its tokenizer has more tokens than its embedding")
        self.tokens = [f"[PAD{number}]" for number in range(size)]
        self.types = [UNUSED] * size
        for text, number in self._model["vocab"].items():
            self.tokens[number], self.types[number] = text, NORMAL
        for added in rules["added_tokens"]:
            self.tokens[added["id"]] = added["content"]
            self.types[added["id"]] = CONTROL if added["special"] else USER_DEFINED

    def add_to(self, writer: Any, template: PromptTemplate) -> None:
        """Write tokens, merges, special tokens and the chat template."""
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(self.cut)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.types)
        pairs: list[Any] = self._model["merges"]
        writer.add_token_merges(
            [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
        )
        self._add_special(writer, template)
        # What a template renders is whole: the engine adds no token to it either.
        writer.add_add_bos_token(False)
        writer.add_chat_template(portable_source(template))

    def _add_special(self, writer: Any, template: PromptTemplate) -> None:
        known = {
            name: self.tokens.index(text)
            for name, text in template.special_tokens.items()
            if text in self.tokens
        }
        for name, add in (("bos_token", writer.add_bos_token_id), ("pad_token", writer.add_pad_token_id),
                          ("unk_token", writer.add_unk_token_id)):  # fmt: skip
            if name in known:
                add(known[name])
        # llama.cpp ends an answer at each of these, and the first is the `eos_token` of the template.
        found = text_format(self._base, template)
        if found.stop_text is not None:
            raise GgufRefused(
                "its answers end with a text that is no token, where llama.cpp would continue"
            )
        ends = list(found.stop_tokens)
        if "eos_token" in template.source and "eos_token" in known:
            ends = list(dict.fromkeys([known["eos_token"], *ends]))
        if not ends:
            raise GgufRefused(
                "it has no end token, and llama.cpp would end its answers at another one"
            )
        places = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
        if len(ends) > len(places):
            raise GgufRefused(
                f"it has {len(ends)} end tokens, and a GGUF file has places for {len(places)}"
            )
        for add, number in zip(places, ends, strict=False):
            add(number)


def _cut_of(rules: dict[str, Any]) -> str:
    """llama.cpp's name for a tokenizer's way of splitting text. Raises `GgufRefused`."""
    before: dict[str, Any] = rules["pre_tokenizer"] or {"type": None}
    parts: list[dict[str, Any]] = before.get("pretokenizers") or [before]
    *steps, last = parts
    normalizer: dict[str, Any] = rules["normalizer"] or {"type": None}
    is_plain = rules["model"]["type"] == "BPE" and normalizer["type"] in (None, "NFC")
    is_bytes = is_plain and last["type"] == "ByteLevel"
    model: dict[str, Any] = rules["model"]
    affixes = ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback")
    if any(model.get(name) for name in affixes):
        is_bytes = False
    for added in rules["added_tokens"]:
        # llama.cpp leaves white space beside a token as it is, and looks for tokens within words.
        if added.get("lstrip") or added.get("rstrip") or added.get("single_word"):
            raise GgufRefused(
                f"its added token {added['id']} is not read as llama.cpp reads tokens"
            )
    # llama.cpp takes a word that is a token as a whole by the name of the cut.
    is_whole = bool(model.get("ignore_merges"))
    if is_bytes and not last.get("add_prefix_space"):
        pattern = steps[0].get("pattern", {}).get("Regex") if len(steps) == 1 else None
        if last.get("use_regex", True):
            if not steps and not is_whole:
                return "gpt-2"
            if steps == [DIGITS] and not is_whole:
                return "smollm"
        elif (pattern, is_whole) in ((QWEN2_CUT, False), (LLAMA3_CUT, True)):
            return "llama-bpe" if is_whole else "qwen2"
    raise GgufRefused("its tokenizer is not one of those that are written as GGUF files")
