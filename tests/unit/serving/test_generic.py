"""Other architectures run through transformers' own layers."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.serving.conftest import make_adapter, quiet_peft
from tests.unit.serving.test_engine import all_packed, build, expected, run
from tuneship.service.catalogues.base_models import NOT_SERVED
from tuneship.serving.models.generic import GenericModel
from tuneship.serving.models.linear import AS_MEASURED, Packing
from tuneship.serving.models.model import CausalModel, ModelRefused
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest

SHAPE = {"vocab_size": 261, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip


def save(directory: Path, kind: str, **options: object) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **options}))
        for weights in model.parameters():
            # Norms and biases change, because with their initial values a lost one would not be noticed.
            if weights.dim() == 1:
                weights.data.add_(torch.randn_like(weights), alpha=0.1)
    model.save_pretrained(directory)
    return model.eval()


OWN_SHAPES: dict[str, dict[str, object]] = {
    "codegen": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 2},
    "gptj": {"n_embd": 32, "n_head": 4, "n_layer": 2, "rotary_dim": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2},
}
WINDOW = {"sliding_window": 12}
QWEN_WINDOW = {**WINDOW, "use_sliding_window": True, "max_window_layers": 1}
# Tokens reused in `check_answers`, from what prompts of one adapter share. Eleven shared tokens are too few.
REUSED = 20 + 29 + 38
TURNS = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", QWEN_WINDOW),
        ("qwen3", {"head_dim": 8, "attention_bias": True}),
        ("phi3", {}),
        ("gemma", {"head_dim": 16}),
        ("gemma2", {**WINDOW, **TURNS, "head_dim": 8, "attn_logit_softcapping": 2.0}),
        ("gemma3_text", {**WINDOW, **TURNS, "head_dim": 8}),
    ],
)
def test_another_architecture_answers_as_generate_does_with_and_without_an_adapter(
    tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    check_answers(tmp_path, kind, options, GenericModel)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen2", {**QWEN_WINDOW, "tie_word_embeddings": False}),
        ("gemma2", {**WINDOW, **TURNS, "head_dim": 8, "tie_word_embeddings": True}),
    ],
)
def test_the_same_with_packed_weights(
    tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    """The models have layers with and without biases, and heads that are the embedding or are not."""
    check_answers(tmp_path, kind, options, GenericModel, all_packed())


def check_answers(
    tmp_path: Path,
    kind: str,
    options: dict[str, object],
    served_by: type[CausalModel],
    packing: Packing = AS_MEASURED,
) -> None:
    """Prompts exceed the window and what one step takes in, and rows with and without the adapter run side by side.

    The prompts begin alike, so keys and values are reused beyond a window, too.
    """
    from peft import PeftModel

    reference = save(tmp_path / "base", kind, **options)
    adapter = make_adapter(
        tmp_path / "base", tmp_path / "adapter", r=4, target_modules="all-linear", seed=3
    )
    assert type(load_model(tmp_path / "base")) is served_by
    engine = build(tmp_path / "base", {"a": adapter}, rows=4, packing=packing, prompt_tokens=20)
    requests = [
        GenerateRequest(tuple(range(9, 20 + 9 * n)), 12, adapter="a" if n % 2 else None)
        for n in range(6)
    ]
    answers = run(engine, requests, joining=2)
    assert engine.stats()["reused_tokens"] == REUSED
    assert answers[0::2] == [expected(reference, request) for request in requests[0::2]]
    with quiet_peft():
        tuned = PeftModel.from_pretrained(reference, adapter)
    assert answers[1::2] == [expected(tuned, request) for request in requests[1::2]]


def test_two_models_of_one_process_do_not_take_each_others_steps(tmp_path: Path) -> None:
    requests = [GenerateRequest(tuple(range(9, 20)), 30)]
    sizes = {"first": {}, "second": {"num_hidden_layers": 3}}
    wanted = {
        name: [expected(save(tmp_path / name, "phi3", **size), request) for request in requests]
        for name, size in sizes.items()
    }
    engines = {name: build(tmp_path / name, {}, rows=1) for name in sizes}
    with ThreadPoolExecutor() as threads:
        found = dict(
            zip(
                engines,
                threads.map(lambda engine: run(engine, requests), engines.values()),
                strict=True,
            )
        )
    assert found == wanted


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        (
            "phi3",
            {**WINDOW, "layer_types": ["full_attention"] * 2},
            "the sliding windows of phi3 models",
        ),
        (
            "llama4_text",
            {"head_dim": 8, "num_local_experts": 2, "attention_chunk_size": 16},
            "llama4_text",
        ),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "lfm2"),
        *((kind, OWN_SHAPES.get(kind, {}), f"{kind} models") for kind in sorted(NOT_SERVED)),
    ],
)
def test_attention_that_is_not_plainly_causal_is_refused(
    tmp_path: Path, kind: str, options: dict[str, object], reason: str
) -> None:
    save(tmp_path, kind, **options)
    with pytest.raises(ModelRefused, match=reason):
        load_model(tmp_path)


def test_a_directory_of_code_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "evil.Config"}}))
    (tmp_path / "evil.py").write_text("raise SystemExit('this ran')")
    with pytest.raises(ModelRefused):
        load_model(tmp_path)
