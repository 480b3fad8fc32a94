"""Write a tiny model as a GGUF file, as llama.cpp's converter does: other names, Llama's heads in another order."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OTHERS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"
}  # fmt: skip
Change = Callable[[Any], object]


def gguf_name(name: str) -> str:
    """The name of a tensor in a GGUF file."""
    stem, _, part = name.rpartition(".")
    if stem in OTHERS:
        return f"{OTHERS[stem]}.{part}"
    number, _, own = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{NAMES[own]}.{part}"


def write_gguf(
    checkpoint: Path, file: Path, number_format: str = "F32", change: Change = lambda _: None
) -> Path:
    """Write the checkpoint as a GGUF file with matrices in a number format; `change` may add to the writer."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(file, kind)
    _add_settings(writer, config)
    _add_tokenizer(writer, checkpoint)
    wanted = gguf.GGMLQuantizationType[number_format]
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        tensor = tensor.astype("float32")  # noqa: PLW2901
        for part, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads")):
            if kind == "llama" and f".{part}_proj." in name:
                shape = (config[heads], 2, -1, *tensor.shape[1:])
                tensor = tensor.reshape(shape).swapaxes(1, 2).reshape(tensor.shape)  # noqa: PLW2901
        if tensor.ndim > 1:
            packed = gguf.quants.quantize(tensor, wanted)
            writer.add_tensor(gguf_name(name), packed, raw_dtype=wanted)
        else:
            writer.add_tensor(gguf_name(name), tensor)
    if (config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def rope_factors(config: dict[str, Any]) -> Any:
    """The factors of Llama 3.1's rotation, by the code of llama.cpp's converter."""
    import math

    import numpy as np

    rope, dim = config["rope_parameters"], config["head_dim"]
    length, low, high = (
        rope[name]
        for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    factors: list[float] = []
    for number in range(0, dim, 2):
        wavelength = 2 * math.pi * rope["rope_theta"] ** (number / dim)
        if wavelength < length / high:
            factors.append(1)
        elif wavelength > length / low:
            factors.append(rope["factor"])
        else:
            smooth = (length / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, np.float32)


def _add_settings(writer: Any, config: dict[str, Any]) -> None:
    writer.add_name("tiny")
    writer.add_license("apache-2.0")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if config["model_type"] == "qwen3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    else:
        writer.add_rope_dimension_count(head_dim)
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, checkpoint: Path) -> None:
    rules = json.loads((checkpoint / "tokenizer.json").read_text())
    words = sorted(rules["model"]["vocab"], key=rules["model"]["vocab"].get)
    special = {token["content"] for token in rules["added_tokens"] if token["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([3 if word in special else 1 for word in words])
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_chat_template((checkpoint / "chat_template.jinja").read_text())
