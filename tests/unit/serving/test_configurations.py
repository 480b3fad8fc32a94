"""Configurations that people bring: each is served as transformers runs each request alone, step by step."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.unit.serving.conftest import make_adapter, quiet_peft
from tests.unit.serving.test_engine import build, expected, run
from tests.unit.serving.test_generic import QWEN_WINDOW, TURNS, WINDOW, save
from tuneship.serving.engine import Engine
from tuneship.serving.lora import Lora, Routes
from tuneship.serving.models.generic import GenericModel
from tuneship.serving.models.llama import LlamaModel
from tuneship.serving.models.model import CausalModel, ModelRefused
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest, TokenScore
from tuneship.serving.weights_choice import logits_of_engine

# The longest text that LongRoPE rotates by the short factors.
BORDER = 32
LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": BORDER, "rope_theta": 10_000.0}  # fmt: skip
PHI3 = {"rope_parameters": LONG, "original_max_position_embeddings": BORDER}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": BORDER}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}
# Prompts beside each other, which begin alike: some cross the border after some tokens or at once, some never.
LENGTHS = (28, 60, 5, 32, 33)
ANSWER_TOKENS = 20


@dataclass(frozen=True)
class Brought:
    """A checkpoint as somebody brings it."""

    kind: str
    # Options that its configuration is made with.
    options: dict[str, Any] = field(default_factory=dict)
    # Changes of its config.json afterwards; None leaves a setting out.
    settings: dict[str, Any] = field(default_factory=dict)
    served_by: type[CausalModel] = GenericModel
    # A change of its tensors.
    stored: Callable[[dict[str, torch.Tensor]], object] = len


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def halve(tensors: dict[str, torch.Tensor]) -> None:
    tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})


def under_the_name_of_the_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")


def old_style(**rope: Any) -> dict[str, Any]:
    """The settings of the rotation as before transformers 5."""
    return {"rope_parameters": None, **rope}


OURS = LlamaModel
TIED = {"tie_word_embeddings": True}
BROUGHT = {
    "llama, whether it is tied left out": Brought("llama", {}, {"tie_word_embeddings": None}, OURS),
    "llama, said to be tied, with two matrices": Brought("llama", {}, TIED, OURS),
    "llama, tied and stored as the head": Brought("llama", TIED, {}, OURS, under_the_name_of_the_head),
    "llama, heads of another size, in bfloat16": Brought("llama", {"head_dim": 16}, {}, OURS, halve),
    "llama 3, no original length": Brought(
        "llama", {}, old_style(rope_scaling={"rope_type": "llama3", **LLAMA3}), OURS
    ),
    "llama 3, original length outside": Brought(
        "llama", {},
        old_style(rope_scaling={"rope_type": "llama3", **LLAMA3}, original_max_position_embeddings=16), OURS,
    ),
    "llama, context left out": Brought("llama", {}, {"max_position_embeddings": None}),
    "llama, longrope": Brought("llama", {"rope_parameters": LONG}),
    "mistral, window left out": Brought("mistral", WINDOW, {"sliding_window": None}),
    "phi 3, longrope": Brought("phi3", PHI3),
    "gemma 3, two rotations": Brought(
        "gemma3_text",
        {**WINDOW, **TURNS, "head_dim": 8, "rope_parameters": {"full_attention": LONG, "sliding_attention": PLAIN}},
    ),
    "gpt-neox, a part of each head rotated": Brought("gpt_neox", {"rotary_pct": 0.25, "num_key_value_heads": 4}),
}  # fmt: skip
MORE = {
    "llama, rope_theta of its own": Brought("llama", {}, old_style(rope_theta=5e5), OURS),
    "llama 3, type for rope_type": Brought(
        "llama", {}, old_style(rope_scaling={**LLAMA3, "type": "llama3", "original_max_position_embeddings": 32}), OURS
    ),
    "llama 3, both styles": Brought(
        "llama", {}, {"rope_parameters": PLAIN, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, OURS
    ),
    "llama, yarn": Brought("llama", {}, old_style(rope_scaling=YARN)),
    "mistral, layer types": Brought("mistral", WINDOW, {"layer_types": ["full_attention"] * 2}),
    "phi 3, longrope and a window": Brought("phi3", {**PHI3, **WINDOW}),
    "llama, yarn with mscale": Brought(
        "llama", {}, old_style(rope_scaling={**YARN, "mscale": 1.0, "mscale_all_dim": 0.7})
    ),
    "llama, linear": Brought("llama", {}, old_style(rope_scaling={"type": "linear", "factor": 2.0})),
    "llama, dynamic": Brought("llama", {}, old_style(rope_scaling={"type": "dynamic", "factor": 2.0})),
    "llama, another activation": Brought("llama", {}, {"hidden_act": "gelu"}),
    "qwen 2, yarn": Brought("qwen2", {}, old_style(rope_scaling=YARN, rope_theta=1e6)),
    "qwen 2, window": Brought("qwen2", QWEN_WINDOW),
    "phi, a part of each head rotated": Brought("phi", {"partial_rotary_factor": 0.5}),
    "phi 3, a part of each head rotated": Brought("phi3", {"partial_rotary_factor": 0.5}),
    "phimoe, longrope": Brought(
        "phimoe",
        {**PHI3, "rope_parameters": {**LONG, "short_mscale": 1.0, "long_mscale": 1.3}, "num_local_experts": 2,
         "sliding_window": None},
    ),
    "gpt 2, positions learnt": Brought("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128,
                                                "num_key_value_heads": 4}),
    "opt, positions learnt": Brought("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32, "num_key_value_heads": 4}),
    "ministral 3, attention scaled by position": Brought(
        "ministral3", {"head_dim": 8, "rope_parameters": {**YARN, "rope_type": "yarn", "llama_4_scaling_beta": 0.1,
                                                          "rope_theta": 1e4}},
    ),
    "stablelm": Brought("stablelm", {"partial_rotary_factor": 0.25}),
    "olmo 2": Brought("olmo2"),
    "cohere 2": Brought("cohere2", {**WINDOW, **TURNS}),
    "granite": Brought(
        "granite", {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.5}
    ),
    "smollm 3, layers without rotation": Brought("smollm3", {"no_rope_layers": [1, 0]}),
    "starcoder 2": Brought("starcoder2", WINDOW),
    "mixtral": Brought("mixtral", {"num_local_experts": 4}),
    "qwen 3 moe": Brought("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                        "head_dim": 8}),
    "glm 4": Brought("glm4", {"head_dim": 8}),
}  # fmt: skip


def made(folder: Path, brought: Brought) -> Any:
    """Write the checkpoint, and load it by transformers."""
    options = {"initializer_range": 0.3, "tie_word_embeddings": False, **brought.options}
    save(folder, brought.kind, **options)
    config = json.loads((folder / "config.json").read_text()) | brought.settings
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    tensors = load_file(folder / "model.safetensors")
    brought.stored(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    "brought",
    [*BROUGHT.values(), *(pytest.param(one, marks=pytest.mark.slow) for one in MORE.values())],
    ids=[*BROUGHT, *MORE],
)
def test_a_configuration_is_served_as_transformers_runs_each_request_alone(
    tmp_path: Path, brought: Brought
) -> None:
    reference = made(tmp_path, brought)
    model = load_model(tmp_path, "float32")
    assert type(model) is brought.served_by
    tokens = list(range(3, 63))
    with torch.inference_mode():
        wanted = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    found = logits_of_engine(model, tokens, Lora(model.sites, torch.float32), Routes((), None))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.std()))

    engine = build(tmp_path, {}, rows=4, prompt_tokens=20)
    requests = [
        GenerateRequest(tuple(range(3, 3 + length)), ANSWER_TOKENS, logprobs=0)
        for length in LENGTHS
    ]
    for request, (answer, scores) in zip(requests, scored(engine, requests), strict=True):
        tokens, wanted_scores = generated(reference, request)
        assert answer == tokens
        assert scores == pytest.approx(wanted_scores, abs=1e-3)
    assert engine.stats()["reused_tokens"] > 0


def scored(engine: Engine, requests: list[GenerateRequest]) -> list[tuple[list[int], list[float]]]:
    """The answers and their log probabilities; two requests join at each step."""
    scores: list[list[TokenScore]] = [[] for _ in requests]
    waiting = list(enumerate(requests))
    while waiting or not engine.idle:
        for number, request in waiting[:2]:
            engine.submit(str(number), request)
        del waiting[:2]
        for identifier, score in engine.step().scores:
            scores[int(identifier)].append(score)
    return [([one.token for one in found], [one.logprob for one in found]) for found in scores]


def generated(reference: Any, request: GenerateRequest) -> tuple[list[int], list[float]]:
    """The greedy tokens and their log probabilities, as `generate` finds them step by step."""
    ids = torch.tensor([request.tokens])
    found = reference.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.max_tokens, do_sample=False,
        eos_token_id=None, pad_token_id=0, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    best = [logits[0].log_softmax(-1).max(-1) for logits in found.logits]
    return [int(one.indices) for one in best], [float(one.values) for one in best]


def test_a_request_that_crosses_the_border_keeps_all_else(tmp_path: Path) -> None:
    """Its adapter, its randomness, the scores of its prompt, and its right to be cancelled."""
    reference = made(tmp_path / "base", BROUGHT["phi 3, longrope"])
    adapter = make_adapter(
        tmp_path / "base", tmp_path / "adapter", r=4, target_modules="all-linear", seed=3
    )
    engine = build(tmp_path / "base", {"a": adapter}, rows=4, prompt_tokens=20)
    short, prompt = GenerateRequest((7, 8, 9), 40), tuple(range(3, 31))
    crossing = GenerateRequest(prompt, ANSWER_TOKENS, adapter="a")
    with quiet_peft():
        tuned = PeftModel.from_pretrained(reference, adapter)
    answers = run(engine, [crossing, short, crossing, crossing])
    wanted = expected(tuned, crossing)
    with tuned.disable_adapter():
        assert answers == [wanted, expected(reference, short), wanted, wanted]

    drawn = GenerateRequest(prompt, ANSWER_TOKENS, temperature=1.5, seed=5)
    assert run(engine, [drawn]) == run(engine, [drawn, short, drawn])[:1]

    engine.submit("a", GenerateRequest(prompt, ANSWER_TOKENS, prompt_logprobs=0))
    results = [engine.step() for _ in range(10)]
    (scores,) = [found for result in results for _, found in result.prompt_scores]
    assert [score.token for score in scores] == list(prompt[1:])
    assert sum(len(result.tokens) for result in results) > BORDER - len(prompt)
    engine.cancel("a")
    assert engine.idle

    # Cancelled where it waits to be computed again.
    engine.submit("b", crossing)
    while engine._sequences["b"].length <= BORDER:
        engine.step()
    assert engine.stats()["waiting"] == 1
    engine.cancel("b")
    assert engine.idle
    engine.unload("a")


def test_a_short_text_beside_a_long_one_has_its_own_numbers(tmp_path: Path) -> None:
    """Not only where it is generated: its score by itself does not depend on what is read with it."""
    reference = made(tmp_path, BROUGHT["phi 3, longrope"])
    engine = build(tmp_path, {}, rows=4, prompt_tokens=200)
    for length in (9, 50):
        request = GenerateRequest(tuple(range(3, 3 + length)), 0, prompt_logprobs=0)
        engine.submit(str(length), request)
    for name, scores in engine.step().prompt_scores:
        ids = torch.arange(3, 3 + int(name))
        with torch.inference_mode():
            logits = reference(input_ids=ids[None], use_cache=False).logits[0, :-1]
        wanted = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        assert [score.logprob for score in scores] == pytest.approx(wanted.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    ("brought", "why"),
    [
        (
            Brought("qwen2", {}, {"layer_types": ["full_attention", "sliding_attention"]}),
            "qwen2 models do not run here: ValueError",
        ),
        (
            Brought("qwen2", {}, {"rope_parameters": {"full_attention": PLAIN}}),
            "transformers cannot load the base model: KeyError",
        ),
        (
            Brought("gemma3_text", {**TURNS, "head_dim": 8}, {
                "rope_parameters": {
                    "full_attention": LONG,
                    "sliding_attention": {**LONG, "original_max_position_embeddings": 16},
                }
            }),
            "its layers change their rotary factors at different lengths: give them one",
        ),
        (
            Brought("phi3", stored=drop("model.layers.1.mlp.down_proj.weight")),
            "the base model has no tensor model.layers.1.mlp.down_proj.weight",
        ),
    ],
    ids=["a window of no size", "a rotation of some layers", "two borders", "a lost tensor"],
)  # fmt: skip
def test_a_configuration_that_is_not_computed_here_is_refused_by_name(
    tmp_path: Path, brought: Brought, why: str
) -> None:
    save(tmp_path, brought.kind, **brought.options)
    config = json.loads((tmp_path / "config.json").read_text()) | brought.settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(tmp_path / "model.safetensors")
    brought.stored(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=why):
        load_model(tmp_path)
