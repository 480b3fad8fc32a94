"""The checkpoints of the zoo: small random models as people bring them. One entry of `CHECKPOINTS` is one row."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.support.zoo.template_kinds import BY_NAME as TEMPLATES
from tests.support.zoo.template_kinds import TemplateKind
from tests.support.zoo.tokenizer_kinds import BY_NAME as TOKENIZERS
from tests.support.zoo.tokenizer_kinds import TokenizerKind

End = Literal["template", "list", "generation", "config", "tokenizer"]
CONTEXT_TOKENS = 256
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": CONTEXT_TOKENS, "initializer_range": 0.3,
    "tie_word_embeddings": True,
}  # fmt: skip
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "mistral": {"model_type": "mistral", "sliding_window": 24, "head_dim": 16},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2", "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 32,
        "initializer_range": 0.2,
    },
    "phi3": {
        "model_type": "phi3", "rope_parameters": LONG_ROPE, "original_max_position_embeddings": 64,
        "resid_pdrop": 0.0,
    },
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.25, "num_key_value_heads": None},
}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A base model of the zoo."""

    name: str
    family: str
    tokenizer: TokenizerKind
    template: TemplateKind
    # The place that names the token which ends an answer of its template.
    ends: End = "config"
    number_format: str = "float32"
    is_tied: bool = True
    # Changes the finished folder.
    change: Callable[[Path], object] = lambda _: None
    # Words of the reason for each refusal, by the name of the column.
    refused: Mapping[str, str] = field(default_factory=dict[str, str])

    def build(self, folder: Path) -> Path:
        """Write the checkpoint."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

        folder.mkdir(parents=True)
        tokenizer = self.tokenizer.save(folder, self.template.marks, **self.template.settings)
        self.template.save(folder)
        end = tokenizer.token_to_id(self.tokenizer.tokens["eos_token"])
        pad = tokenizer.token_to_id(self.tokenizer.tokens.get("pad_token", ""))
        # A multiple of 32, as most real ones have: more than the tokenizer knows.
        size = -(-tokenizer.get_vocab_size() // 32) * 32
        options = {**SHAPE, **FAMILIES[self.family], "vocab_size": size, "pad_token_id": pad}
        options |= {"bos_token_id": None, "eos_token_id": end, "tie_word_embeddings": self.is_tied}
        if self.ends == "tokenizer":
            options["eos_token_id"] = None
        with torch.random.fork_rng():
            torch.manual_seed(0)
            config = AutoConfig.for_model(**options)
            model: Any = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, self.number_format)
            )
        marks = [tokenizer.token_to_id(mark) for mark in self.template.marks]
        named: dict[End, Any] = {"list": [end, *marks[-1:]], "generation": (marks or [end])[-1]}
        model.generation_config = GenerationConfig(
            eos_token_id=named.get(self.ends, options["eos_token_id"]), pad_token_id=pad
        )
        model.save_pretrained(folder)
        if self.ends in ("config", "tokenizer", "template"):
            (folder / "generation_config.json").unlink()
        self.change(folder)
        return folder


def in_shards(folder: Path) -> None:
    """Save the weights again in shards, and beside them the file of another format that some repositories have."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    names, index = sorted(tensors), dict[str, str]()
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for number, half in enumerate(halves, start=1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in half}, folder / file, {"format": "pt"})
        index |= dict.fromkeys(half, file)
    content = {"metadata": {"total_size": 1}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")


def _row(
    name: str, family: str, tokenizer: str, template: str, ends: End, **more: Any
) -> Checkpoint:
    return Checkpoint(name, family, TOKENIZERS[tokenizer], TEMPLATES[template], ends, **more)


def no_gguf(why: str) -> dict[str, str]:
    """The refusal of a row whose tuned models are not written as GGUF files."""
    return {"GGUF": why}


TOKENIZER, WINDOW = "tokenizer", "sliding window"
CHECKPOINTS = (
    _row("Llama 2", "llama", "llama2-legacy", "Llama 2", "config", is_tied=False, refused=no_gguf(TOKENIZER)),
    _row("Llama 3", "llama", "llama3", "Llama 3", "generation"),
    _row("Qwen 2.5 base", "qwen2", "qwen2", "ChatML", "template"),
    _row("Gemma 2", "gemma2", "class-gemma", "Gemma", "list", refused=no_gguf("gemma2")),
    _row("Qwen 2.5", "qwen2", "class-qwen2", "default system", "list"),
    _row("Qwen 3", "qwen3", "qwen2", "strips reasoning", "generation", number_format="bfloat16"),
    _row(
        "Mistral", "mistral", "metaspace-first", "alternates", "config",
        is_tied=False, change=in_shards, refused=no_gguf(WINDOW),
    ),
    _row("Phi 3", "phi3", "rstrip", "Phi 3", "list", number_format="bfloat16", refused=no_gguf("phi3")),
    _row("GPT-NeoX", "gpt_neox", "neox", "Alpaca", "config", refused=no_gguf("gpt_neox")),
    _row("Zephyr", "llama", "metaspace-first", "Zephyr", "tokenizer", refused=no_gguf(TOKENIZER)),
    _row("SmolLM2", "llama", "gpt2", "generation", "template"),
    _row("no template", "llama", "gpt2", "built-in", "config"),
    _row("Alpaca", "llama", "llama2-legacy", "Alpaca", "tokenizer", refused=no_gguf(TOKENIZER)),
    _row("LlamaTokenizer", "llama", "class-llama", "ChatML", "template", refused=no_gguf(TOKENIZER)),
    _row("named templates", "qwen2", "marks-in-config", "named", "template"),
    _row("stored limits", "qwen2", "stored-limits", "ChatML", "list"),
    _row("Unigram", "llama", "unigram", "ChatML", "template", refused=no_gguf(TOKENIZER)),
    _row("cleaned-up spaces", "llama", "cleans-up", "Zephyr", "config", refused=no_gguf(TOKENIZER)),
    _row("WordPiece", "llama", "wordpiece", "ChatML", "template", refused={"added": "WordPiece"}),
    _row("opens think", "qwen2", "qwen2", "opens think", "template", refused={"loss": "reasoning"}),
    _row("trailing space", "llama", "llama3", "trailing space", "config", refused={"loss": "space"}),
)  # fmt: skip
BY_NAME = {checkpoint.name: checkpoint for checkpoint in CHECKPOINTS}
