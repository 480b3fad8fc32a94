"""Build a tiny random Llama with a byte-level tokenizer, for tests that load a real model."""

import json
from pathlib import Path

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
SPECIAL_TOKENS = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]


def build_tiny_model(directory: Path) -> Path:
    """Build a Hugging Face model directory: 2 layers of width 32, tokens for 256 bytes and 5 special ones."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = save_tokenizer(directory)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.3,  # so large that the model learns and its greedy choices are clear
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    model.save_pretrained(directory)
    return directory


def save_tokenizer(directory: Path) -> int:
    """Save a tokenizer of bytes and special tokens with a chat template; return the size of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<|pad|>",
        "eos_token": "<|end|>",
        "model_max_length": 256,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return tokenizer.get_vocab_size()
