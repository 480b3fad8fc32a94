"""Tiny random models, one of each family of base models, with the features that distinguish it from a plain Llama."""

from pathlib import Path
from typing import Any

from tests.support.models.tiny_model import save_tokenizer

SHAPE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-with-biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-window": {
        "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "mistral": {"model_type": "mistral", "sliding_window": 5, "head_dim": 16},
    "gemma": {"model_type": "gemma", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0,
    },
    "gemma3": {
        "model_type": "gemma3_text", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3-long": {
        "model_type": "phi3", "original_max_position_embeddings": 13, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 13,
            "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
        },
    },
    "bloom": {"model_type": "bloom"},
}  # fmt: skip
# Families that cannot be trained on packed rows, because their attention computes the positions itself.
UNPACKED = {"bloom"}


def build_family(directory: Path, name: str, **changes: Any) -> Path:
    """Build a model directory; norms and biases are random too, so that a lost one would be noticed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    directory.mkdir(parents=True, exist_ok=True)
    options = {**SHAPE, "vocab_size": save_tokenizer(directory), **FAMILIES[name], **changes}
    if options["model_type"] == "qwen2":
        # transformers gives every Qwen 2 its own tokenizer's rules and end token, whatever tokenizer.json says.
        AutoConfig.for_model(**options).save_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(str(directory))
        tokenizer.save_pretrained(directory)
        options |= {"vocab_size": len(tokenizer), **changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**options))
        for weights in model.parameters():
            if weights.dim() == 1:
                weights.data.add_(torch.randn_like(weights), alpha=0.1)
    model.save_pretrained(directory)
    return directory
