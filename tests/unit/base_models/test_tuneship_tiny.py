"""The shipped base model is complete, small and as its model card says. The card reports how well it can be tuned."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "tuneship" / "base_models" / "tuneship-tiny"
CARD_GAIN = 16.0
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
    """LoRA cannot move the tied embeddings, so a token that was never trained could never be tuned."""
    lengths = model.get_input_embeddings().weight.norm(dim=1)
    assert lengths.min() > 0.3 * lengths.median()


def test_the_norms_gains_are_sixteen_times_those_of_an_ordinary_model(model):
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            assert 0.25 < (norm.weight / CARD_GAIN).abs().median() < 4


def test_folding_the_gains_back_changes_no_bit_of_the_logits(model):
    unfolded = copy.deepcopy(model)
    with torch.no_grad():
        for layer in unfolded.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.div_(CARD_GAIN)
            for linear in (attention.q_proj, attention.k_proj, attention.o_proj):
                linear.weight.mul_(CARD_GAIN)
            for linear in (mlp.gate_proj, mlp.down_proj):
                linear.weight.mul_(CARD_GAIN)
    ids = torch.arange(40)[None] * 7
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, unfolded(ids).logits)


@pytest.mark.slow
@pytest.mark.soak
def test_the_script_makes_a_model_of_the_shipped_shape(model, tmp_path):
    script = ROOT / "scripts" / "make_base_model.py"
    subprocess.run([sys.executable, script, "--steps", "2", "--output", tmp_path], check=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {name: p.shape for name, p in loaded.named_parameters()} == {
        name: p.shape for name, p in model.named_parameters()
    }
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((tmp_path / file).read_text()) == json.loads((TINY / file).read_text())
    template = "chat_template.jinja"
    assert (tmp_path / template).read_text() == (TINY / template).read_text()
