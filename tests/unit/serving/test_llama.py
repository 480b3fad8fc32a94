"""Llama and its kin, read without transformers, are compared with transformers itself."""

import json
import re
from pathlib import Path

import pytest
from peft import PeftModel

from tests.unit.serving.conftest import make_adapter, quiet_peft
from tests.unit.serving.test_engine import all_packed, build, expected, run
from tests.unit.serving.test_generic import WINDOW, check_answers, save
from tests.unit.serving.test_merged_weights import merged
from tuneship.serving.merged_weights import STEADY_STEPS
from tuneship.serving.models.generic import GenericModel
from tuneship.serving.models.llama import KINDS, LlamaModel
from tuneship.serving.models.model import ModelRefused
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest

KIN: dict[str, list[dict[str, object]]] = {
    "llama": [{}, {"tie_word_embeddings": True}],
    "mistral": [WINDOW, {"sliding_window": None, "head_dim": 16}],
    "qwen2": [{}, {"tie_word_embeddings": True, "num_key_value_heads": 4}],
    "qwen3": [{"head_dim": 8}, {"head_dim": 16, "tie_word_embeddings": True}],
}
CASES = [(kind, options) for kind, found in KIN.items() for options in found]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_each_answers_as_generate_does_with_and_without_an_adapter(
    tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    check_answers(tmp_path, kind, options, LlamaModel)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_with_packed_weights(tmp_path: Path, kind: str) -> None:
    check_answers(tmp_path, kind, KIN[kind][0], LlamaModel, all_packed())


@pytest.mark.parametrize("kind", KINDS)
def test_each_answers_the_same_when_its_adapter_is_merged(tmp_path: Path, kind: str) -> None:
    """Biases, norms and windows stay where they are."""
    reference = save(tmp_path / "base", kind, **KIN[kind][0])
    adapter = make_adapter(
        tmp_path / "base", tmp_path / "adapter", r=4, target_modules="all-linear", seed=3
    )
    engine = build(tmp_path / "base", {"a": adapter}, rows=1)
    sites = len(engine._lora._sites)
    request = GenerateRequest(tuple(range(9, 20)), STEADY_STEPS + sites + 20, adapter="a")
    (answer,) = run(engine, [request])
    assert len(merged(engine, "a")) == sites
    with quiet_peft():
        tuned = PeftModel.from_pretrained(reference, adapter)
    assert answer == expected(tuned, request)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, name) for kind, names in KINDS.items() for name in sorted(names)),
        ("llama", "num_hidden_layers"),
    ],
)
def test_values_a_configuration_leaves_to_its_architecture_are_not_guessed(
    tmp_path: Path, kind: str, name: str
) -> None:
    """Transformers knows the default of each setting, and reports it where that does not fit the weights."""
    save(tmp_path, kind, **KIN[kind][0])
    assert isinstance(load_model(tmp_path), LlamaModel)
    change(tmp_path, name)
    try:
        found = load_model(tmp_path)
    except ModelRefused as refusal:
        assert re.search("transformers cannot load|no tensor", str(refusal))  # noqa: PT017 (either is right)
    else:
        assert isinstance(found, GenericModel)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("hidden_size", 16, "model.embed_tokens.weight is 261 x 32, its config.json says 261 x 16"),
        ("vocab_size", 100, "model.embed_tokens.weight is 261 x 32"),
        ("intermediate_size", 48, "gate_proj.weight is 64 x 32, its config.json says 48 x 32"),
        ("num_key_value_heads", 4, "k_proj.weight is 16 x 32"),
        ("num_hidden_layers", 3, "no tensor model.layers.2"),
        ("num_hidden_layers", "two", "num_hidden_layers .* not a whole number above 0"),
        ("num_attention_heads", 0, "num_attention_heads .* not a whole number above 0"),
        ("max_position_embeddings", "many", "max_position_embeddings .* not a whole number"),
        ("num_key_value_heads", 3, "fits no attention"),
        ("head_dim", 7, "fits no attention"),
        ("head_dim", 6, "q_proj.weight is 32 x 32, its config.json says 24 x 32"),
        ("rms_norm_eps", -1, "rms_norm_eps .* not a number above 0"),
        ("rope_parameters", ["default"], "the rotation .* not an object"),
        ("rope_parameters", {"rope_theta": "high"}, "rope_theta .* not a number above 0"),
        ("rope_parameters", {"rope_type": "llama3"}, "low_freq_factor .* not a number above 0"),
    ],
)
def test_a_configuration_that_does_not_fit_the_weights_is_refused_by_name(
    tmp_path: Path, name: str, value: object, reason: str
) -> None:
    save(tmp_path, "llama")
    change(tmp_path, name, value)
    with pytest.raises(ModelRefused, match=reason):
        load_model(tmp_path)


def change(directory: Path, name: str, value: object = None) -> None:
    """Change one setting of a model, or remove it with None."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {name: value}
    file.write_text(json.dumps({key: one for key, one in config.items() if one is not None}))


def test_a_model_with_a_sliding_window_is_served_beyond_its_window(tmp_path: Path) -> None:
    save(tmp_path, "mistral", sliding_window=48)
    assert load_model(tmp_path).facts.context_length == 128


def test_weights_that_are_missing_or_damaged_are_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((base / "config.json").read_text())
    with pytest.raises(ModelRefused, match="it has no safetensors file"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelRefused, match="cannot be read"):
        load_model(tmp_path)
