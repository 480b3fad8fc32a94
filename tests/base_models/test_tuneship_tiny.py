"""The shipped base model is complete, small and as its card says; how well it tunes is measured in the card."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = Path(__file__).resolve().parents[2] / "tuneship" / "base_models" / "tuneship-tiny"
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "Fill in the blank: Abscess of ___"},
]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TINY)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


def test_the_whole_model_takes_at_most_eight_megabytes():
    assert sum(file.stat().st_size for file in TINY.iterdir()) <= 8_000_000


def test_the_logits_are_finite_at_the_full_context_length(model):
    length = model.config.max_position_embeddings
    assert length >= 512
    ids = torch.arange(length)[None] % model.config.vocab_size
    with torch.inference_mode():
        logits = model(ids).logits
    assert logits.shape == (1, length, model.config.vocab_size)
    assert torch.isfinite(logits).all()


def test_output_and_input_embeddings_are_one_matrix(model):
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_an_assistant_turn_ends_with_the_token_that_stops_generation(model, tokenizer):
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    answered = [*MESSAGES, {"role": "assistant", "content": "skin"}]
    ids = tokenizer.apply_chat_template(answered, return_dict=False)
    assert ids[-1] == tokenizer.eos_token_id
    assert ids.count(tokenizer.eos_token_id) == 1


def test_a_prompt_shows_each_role_and_ends_with_the_assistants_marker(tokenizer):
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert prompt == (
        "<|system|>Answer briefly.<|user|>Fill in the blank: Abscess of ___<|assistant|>"
    )


def test_each_role_marker_is_one_token():
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    for marker in ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"):
        assert tokenizer.encode(marker, add_special_tokens=False).ids == [
            tokenizer.token_to_id(marker)
        ]


@pytest.mark.parametrize(
    "text",
    [
        "Burn of third degree of multiple sites of left lower limb, except ankle and foot",
        "  two spaces,\ttabs\nand lines  ",
        "Sjögren's syndrome: 37.5 °C, 日本語, 🙂",
        "",
    ],
)
def test_any_text_survives_tokenising_and_decoding(text):
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_tokens_of_their_own():
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert tokenizer.encode("2026", add_special_tokens=False).tokens == ["2", "0", "2", "6"]


def test_no_embedding_is_left_as_it_was_drawn(model):
    """LoRA cannot move the tied embeddings, so a token without training could never be tuned."""
    lengths = model.get_input_embeddings().weight.norm(dim=1)
    assert lengths.min() > 0.3 * lengths.median()
