"""Every way to save a LoRA with peft is answered as peft does, or refused by the name of its option."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.models.families import build_family
from tests.support.models.peft_adapters import trained_elsewhere
from tuneship.conversion.logits import distance, engine_logits, engine_with_adapter
from tuneship.conversion.plain_adapter import CHOOSING, write_plain
from tuneship.host.weight_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from tuneship.serving.adapters import FOLLOWED, WITHOUT_EFFECT, AdapterRefused

pytestmark = [
    pytest.mark.slow,
    # What peft says of its options, and that it asks a model of transformers for a property by its old name.
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

TEXT = [65, 66, 67, 68, 69, 70]
ACCEPTED: dict[str, dict[str, Any]] = {
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "mica": {"init_lora_weights": "mica"},
    "eva": {"init_lora_weights": "eva"},
    "random": {"init_lora_weights": False},
    "one layer": {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": 1},
    "named layers": {
        "target_modules": ["q_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers",
    },
    "regular expression": {"target_modules": r".*\.(q|v)_proj"},
    "excluded": {"exclude_modules": ["layers.0.self_attn.q_proj", "up_proj"]},
    "excluded by expression": {"exclude_modules": r".*layers\.0\..*"},
    "patterns": {"rank_pattern": {"q_proj": 2, "^model.layers.0.mlp.up_proj": 6}, "alpha_pattern": {"layers.1.*": 3}},
    "rslora": {"use_rslora": True, "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"v_proj": 5}},
    "tying": {"ensure_weight_tying": True, "target_modules": ["q_proj"]},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "pissa": ({"init_lora_weights": "pissa"}, "path_initial_model_for_weight_conversion"),
    "fast pissa": ({"init_lora_weights": "pissa_niter_2"}, "init_lora_weights is pissa_niter_2"),
    "olora": ({"init_lora_weights": "olora"}, "init_lora_weights is olora"),
    "dora": ({"use_dora": True}, "use_dora"),
    "tokens": ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens"),
    "head": ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),
    "whole head": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "lora bias": ({"lora_bias": True}, "lora_bias"),
    "biases": ({"bias": "lora_only"}, "LoRA option bias"),
    "parameters": ({"target_modules": [], "target_parameters": ["q_proj.weight"]}, "target_parameters"),
    "replicated": ({"layer_replication": [[0, 2], [0, 2]]}, "layer_replication"),
    "activated": ({"alora_invocation_tokens": [65, 66]}, "alora_invocation_tokens"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_family(tmp_path_factory.mktemp("base") / "base", "llama-with-biases")


def answers(base: Path, adapter: Path) -> torch.Tensor:
    """The engine's logits with the adapter as an import writes it."""
    source = shutil.copytree(adapter, adapter.with_name("received"), dirs_exist_ok=True)
    plain = adapter.with_name("plain")
    shutil.rmtree(plain, ignore_errors=True)
    plain.mkdir()
    write_plain(source, plain, "base")
    return engine_logits(engine_with_adapter(base, plain), TEXT)


@torch.inference_mode()
def peft_answers(base: Path, adapter: Path) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, str(adapter)).eval()
    return model(input_ids=torch.tensor([TEXT])).logits[0]


@pytest.mark.parametrize("options", ACCEPTED.values(), ids=ACCEPTED)
def test_an_accepted_adapter_answers_as_in_peft(
    tmp_path: Path, base: Path, options: dict[str, Any]
) -> None:
    adapter = trained_elsewhere(base, tmp_path / "adapter", **options)
    expected = peft_answers(base, adapter)
    assert distance([answers(base, adapter)], [expected]) < 1e-5
    # peft reads what is stored, too: it is what an export hands out.
    assert distance([peft_answers(base, adapter.with_name("plain"))], [expected]) < 1e-5


@pytest.mark.parametrize(("options", "why"), REFUSED.values(), ids=REFUSED)
def test_another_one_is_refused_by_the_name_of_its_option(
    tmp_path: Path, base: Path, options: dict[str, Any], why: str
) -> None:
    adapter = trained_elsewhere(base, tmp_path / "adapter", **options)
    with pytest.raises(AdapterRefused, match=why):
        answers(base, adapter)


def test_an_adapter_of_pissa_that_peft_converted_answers_as_the_tuned_model(
    tmp_path: Path, base: Path
) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights="pissa")
    from peft import get_peft_model

    model = get_peft_model(model, settings)
    model.save_pretrained(tmp_path / "begun")
    for name, weights in model.named_parameters():
        if "lora_B" in name:
            weights.data.add_(torch.randn_like(weights), alpha=0.05)
    with torch.inference_mode():
        tuned = model(input_ids=torch.tensor([TEXT])).logits[0]
    model.save_pretrained(
        tmp_path / "adapter", path_initial_model_for_weight_conversion=str(tmp_path / "begun")
    )
    assert distance([answers(base, tmp_path / "adapter")], [tuned]) < 1e-4


@pytest.mark.parametrize("number_format", [torch.float16, torch.bfloat16, torch.float64])
def test_number_formats_in_which_adapters_are_saved_are_accepted(
    tmp_path: Path, base: Path, number_format: torch.dtype
) -> None:
    adapter = trained_elsewhere(base, tmp_path / "adapter")
    expected = peft_answers(base, adapter)
    save_as(number_format, adapter)
    assert distance([answers(base, adapter)], [expected]) < 0.01


@pytest.mark.parametrize("number_format", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_numbers_that_would_take_more_memory_than_their_file_says_are_refused(
    tmp_path: Path, base: Path, number_format: torch.dtype
) -> None:
    adapter = trained_elsewhere(base, tmp_path / "adapter")
    save_as(number_format, adapter)
    with pytest.raises(AdapterRefused, match=rf"its numbers are {str(number_format)[6:]}"):
        answers(base, adapter)


def save_as(number_format: torch.dtype, adapter: Path) -> None:
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    save_file(
        {name: one.to(number_format) for name, one in tensors.items()}, adapter / ADAPTER_WEIGHTS
    )


def test_tensors_that_peft_passes_over_are_refused(tmp_path: Path, base: Path) -> None:
    adapter = trained_elsewhere(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    tensors = load_file(adapter / ADAPTER_WEIGHTS)
    renamed = {name.replace(".weight", ".default.weight"): one for name, one in tensors.items()}
    for changed in (
        renamed,
        {name.removeprefix("base_model."): one for name, one in tensors.items()},
    ):
        save_file(changed, adapter / ADAPTER_WEIGHTS)
        with pytest.raises(AdapterRefused, match="is not a LoRA matrix of a linear layer"):
            answers(base, adapter)
    save_file(tensors, adapter / ADAPTER_WEIGHTS)
    config = json.loads((adapter / ADAPTER_CONFIG).read_text())
    (adapter / ADAPTER_CONFIG).write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    with pytest.raises(AdapterRefused, match=r"v_proj.* is of a layer that adapter_config"):
        answers(base, adapter)


def test_every_field_that_is_let_pass_is_one_of_pefts() -> None:
    fields = {field.name for field in dataclasses.fields(LoraConfig)}
    assert fields >= FOLLOWED | CHOOSING | WITHOUT_EFFECT
