"""A running engine answers like transformers' own `generate()`, token for token."""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import tuneship
from tests.unit.serving.conftest import exploding
from tuneship.serving.adapters import AdapterRefused
from tuneship.serving.engine import Engine, EngineLimits, RequestRefused, SequenceTooLarge
from tuneship.serving.models.linear import AS_MEASURED, Packing
from tuneship.serving.models.llama import LlamaModel
from tuneship.serving.models.model import CausalModel
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import FinishReason, GenerateRequest

PROMPT = (10, 20, 30, 40, 50)


@pytest.fixture(params=["as they are", "laid out"])
def packing(request: pytest.FixtureRequest) -> Packing:
    """Keep the weights as they are, then let oneDNN lay all of them out, where torch has it."""
    return all_packed() if request.param == "laid out" else AS_MEASURED


def all_packed() -> Packing:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    return Packing(is_faster=True, small_bytes=0)


@pytest.fixture
def engine(base: Path, adapters: Mapping[str, Path]) -> Engine:
    return build(base, adapters, rows=6)


def build(
    base: Path,
    adapters: Mapping[str, Path],
    rows: int,
    packing: Packing = AS_MEASURED,
    **limits: Any,
) -> Engine:
    engine = Engine(load_model(base, packing=packing), EngineLimits(slots=rows, **limits))
    for name, path in adapters.items():
        engine.load(name, path)
    return engine


def expected(reference: Any, request: GenerateRequest) -> list[int]:
    ids = torch.tensor([request.tokens])
    generated = reference.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return generated[0, len(request.tokens) :].tolist()


def run(
    engine: Engine, requests: Iterable[GenerateRequest], *, joining: int = 1000
) -> list[list[int]]:
    """Return the answers in order. `joining` requests are submitted before each step."""
    arriving = list(enumerate(requests))
    answers: list[list[int]] = [[] for _ in arriving]
    while arriving or not engine.idle:
        for number, request in arriving[:joining]:
            engine.submit(str(number), request)
        del arriving[:joining]
        result = engine.step()
        assert not result.failed
        for identifier, token in result.tokens:
            answers[int(identifier)].append(token)
    return answers


@pytest.mark.parametrize("adapter", [None, "wide", "narrow"])
def test_an_answer_is_that_of_generate(
    engine: Engine, references: Mapping[str | None, Any], adapter: str | None
) -> None:
    request = GenerateRequest(PROMPT, max_tokens=40, adapter=adapter)
    assert run(engine, [request]) == [expected(references[adapter], request)]


@pytest.mark.parametrize("joining", [1, 3, 1000])
def test_a_mixed_batch_with_joiners_answers_each_request_as_if_it_were_alone(
    base: Path,
    adapters: Mapping[str, Path],
    references: Mapping[str | None, Any],
    packing: Packing,
    joining: int,
) -> None:
    engine = build(base, adapters, rows=6, packing=packing)
    draws = random.Random(joining)  # noqa: S311 (test data)
    requests = [
        GenerateRequest(
            tuple(draws.randrange(5, 261) for _ in range(draws.randrange(1, 60))),
            max_tokens=draws.randrange(1, 25),
            adapter=draws.choice([None, "wide", "narrow"]),
        )
        for _ in range(24)
    ]
    answers = run(engine, requests, joining=joining)
    assert answers == [expected(references[request.adapter], request) for request in requests]


def test_prompts_that_enter_in_parts_give_the_same_answers(
    base: Path, adapters: Mapping[str, Path], references: Mapping[str | None, Any]
) -> None:
    engine = build(base, adapters, rows=4, prompt_tokens=7)
    draws = random.Random(5)  # noqa: S311 (test data)
    requests = [
        GenerateRequest(
            tuple(draws.randrange(5, 261) for _ in range(length)),
            max_tokens=draws.randrange(1, 12),
            adapter=draws.choice([None, "wide", "narrow"]),
        )
        for length in (90, 3, 7, 40, 1, 8, 15, 200)
    ]
    answers = run(engine, requests, joining=2)
    assert answers == [expected(references[request.adapter], request) for request in requests]


def test_a_long_prompt_does_not_hold_up_those_who_generate(base: Path) -> None:
    engine = build(base, {}, rows=4, prompt_tokens=10)
    engine.submit("short", GenerateRequest(PROMPT, max_tokens=50))
    engine.step()
    engine.submit("long", GenerateRequest((9,) * 101, max_tokens=5))
    names = [sorted(name for name, _ in engine.step().tokens) for _ in range(12)]
    assert names == [["short"]] * 10 + [["long", "short"]] * 2


def test_cancelling_a_prompt_that_enters_frees_its_row(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=2, prompt_tokens=10)
    request = GenerateRequest(PROMPT, max_tokens=30)
    engine.submit("short", request)
    generated = [token for _, token in engine.step().tokens]
    engine.submit("long", GenerateRequest((9,) * 90, max_tokens=5))
    generated += [token for _ in range(3) for _, token in engine.step().tokens]
    engine.cancel("long")
    other = GenerateRequest((8,) * 30, max_tokens=9)
    engine.submit("other", other)
    others: list[int] = []
    while not engine.idle:
        for name, token in engine.step().tokens:
            (generated if name == "short" else others).append(token)
    assert generated == expected(references[None], request)
    assert others == expected(references[None], other)


def test_memory_bounds_what_runs_and_whoever_needs_more_than_all_of_it_is_refused(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    model = load_model(base)
    token_bytes = model.facts.cache.token_bytes
    engine = Engine(model, EngineLimits(slots=8, cache_bytes=100 * token_bytes))
    with pytest.raises(SequenceTooLarge, match=r"101 tokens of prompt and answer, .* holds 100"):
        engine.submit("huge", GenerateRequest((7,) * 91, max_tokens=10))
    requests = [GenerateRequest((n + 9,) * (5 + 9 * (n % 4)), max_tokens=12) for n in range(12)]
    answers: dict[str, list[int]] = {str(n): [] for n in range(12)}
    for number, request in enumerate(requests):
        engine.submit(str(number), request)
    most = 0
    while not engine.idle:
        for name, token in engine.step().tokens:
            answers[name].append(token)
        most = max(most, engine.stats()["running"])
        assert engine.stats()["cache_bytes"] <= 100 * token_bytes
    assert 1 < most < 8
    assert list(answers.values()) == [expected(references[None], one) for one in requests]
    assert engine.stats()["cache_limit_bytes"] == 100 * token_bytes


def test_an_idle_engine_gives_its_memory_back(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=8, kept_bytes=20_000)
    few, many = GenerateRequest((7,) * 9, max_tokens=3), GenerateRequest((7,) * 200, max_tokens=9)
    assert run(engine, [few]) == [expected(references[None], few)]
    engine.shrink()
    assert engine.is_shrunk
    assert 0 < engine.stats()["cache_bytes"] <= 20_000
    assert run(engine, [many] * 5) == [expected(references[None], many)] * 5
    assert not engine.is_shrunk
    engine.shrink()
    assert engine.is_shrunk
    assert engine.stats()["cache_bytes"] == 0
    assert run(engine, [few]) == [expected(references[None], few)]


def test_a_hundred_requests_of_one_deployment_do_not_hold_up_one_of_another(base: Path) -> None:
    engine = build(base, {}, rows=2)
    for number in range(100):
        engine.submit(f"a{number}", GenerateRequest(PROMPT, max_tokens=3, queue="a"))
    engine.step()
    engine.submit("b", GenerateRequest(PROMPT, max_tokens=3, queue="b"))
    ended: list[str] = []
    while "b" not in ended:
        ended += [name for name, _ in engine.step().finished]
    assert len(ended) <= 4


def test_the_logits_are_those_of_transformers_for_every_rope_and_head_shape(
    tmp_path: Path, packing: Packing
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"vocab_size": 64, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
    stretched = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    for number, options in enumerate(
        [
            {"num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
            {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "rope_parameters": stretched,
            },
        ]
    ):
        with torch.random.fork_rng():
            torch.manual_seed(number)
            config = LlamaConfig(**shape, **options, max_position_embeddings=128)
            reference = LlamaForCausalLM(config)
        reference.save_pretrained(tmp_path / str(number))
        engine = build(tmp_path / str(number), {}, rows=32, packing=packing)
        assert isinstance(engine._model, LlamaModel)
        request = GenerateRequest(tuple(range(1, 60)), max_tokens=30)
        assert run(engine, [request]) == [expected(reference, request)]


def test_the_shipped_base_answers_as_generate_does() -> None:
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    shipped = Path(tuneship.__file__).parent / "base_models" / "tuneship-tiny"
    tokenizer = Tokenizer.from_file(str(shipped / "tokenizer.json"))
    texts = ["Repeat: acute bronchitis", "fracture of the left femur, initial encounter", "a"]
    requests = [GenerateRequest(tuple(tokenizer.encode(text).ids), max_tokens=24) for text in texts]
    engine = Engine(load_model(shipped), EngineLimits())
    reference = AutoModelForCausalLM.from_pretrained(shipped)
    assert run(engine, requests) == [expected(reference, request) for request in requests]


class Overheard:
    """A model that keeps the logits of its last step."""

    def __init__(self, model: CausalModel) -> None:
        self.model = model
        self.facts, self.sites = model.facts, model.sites

    def forward(self, *arguments: Any) -> torch.Tensor:
        self.logits = self.model.forward(*arguments)
        return self.logits


def test_weights_in_bfloat16_give_nearly_the_same_logits(base: Path) -> None:
    models = [Overheard(load_model(base, dtype)) for dtype in ("float32", "bfloat16")]
    for model in models:
        engine = Engine(model, EngineLimits())
        engine.submit("a", GenerateRequest(PROMPT, max_tokens=5))
        engine.step()
    exact, rounded = (model.logits for model in models)
    assert not torch.equal(exact, rounded)
    assert torch.allclose(exact, rounded, atol=0.05 * float(exact.std()))


def test_the_same_seed_repeats_whatever_the_neighbours(engine: Engine) -> None:
    def sampled(seed: int, adapter: str | None = None) -> GenerateRequest:
        return GenerateRequest(
            PROMPT, max_tokens=20, adapter=adapter, temperature=1.0, top_p=0.9, seed=seed
        )

    alone = run(engine, [sampled(1)])[0]
    crowd = run(
        engine, [sampled(2), sampled(1, "wide"), sampled(1), sampled(3, "narrow")], joining=1
    )
    assert crowd[2] == alone
    assert len({tuple(answer) for answer in crowd}) == 4


def test_temperature_top_p_seed_and_length_each_change_the_answer(engine: Engine) -> None:
    def answer(**settings: Any) -> list[int]:
        return run(engine, [GenerateRequest(PROMPT, **{"max_tokens": 20, **settings})])[0]

    greedy = answer()
    hot = answer(temperature=1.5, seed=1)
    assert hot != greedy
    assert answer(temperature=1.5, seed=2) != hot
    assert answer(temperature=1.5, seed=1, top_p=0.3) != hot
    assert answer(temperature=1.5, seed=1, top_p=1e-6) == greedy
    assert answer(temperature=1e-4, seed=1) == greedy
    assert answer(max_tokens=7) == greedy[:7]


def test_a_stop_token_ends_an_answer_before_it(engine: Engine) -> None:
    whole = run(engine, [GenerateRequest(PROMPT, max_tokens=20)])[0]
    stop = whole[7]
    engine.submit("a", GenerateRequest(PROMPT, max_tokens=20, stop_tokens=(stop,)))
    generated: list[int] = []
    while not engine.idle:
        result = engine.step()
        generated += [token for _, token in result.tokens]
    assert generated == whole[: whole.index(stop)]
    assert result.finished == [("a", FinishReason.STOP)]


def test_a_full_context_ends_an_answer(engine: Engine) -> None:
    assert [
        len(answer) for answer in run(engine, [GenerateRequest((7,) * 250, max_tokens=100)])
    ] == [6]


def test_cancelling_frees_the_row_and_leaves_the_neighbours_alone(
    engine: Engine, references: Mapping[str | None, Any]
) -> None:
    requests = [GenerateRequest((n + 10, n + 20), max_tokens=20, adapter="wide") for n in range(8)]
    generated: dict[str, list[int]] = {str(n): [] for n in range(8)}
    for number, request in enumerate(requests):
        engine.submit(str(number), request)
    for step in range(1000):
        if engine.idle:
            break
        for identifier, token in engine.step().tokens:
            generated[identifier].append(token)
        if step == 5:
            # This sequence is in the first row, and another one moves there.
            engine.cancel("0")
            # This sequence is still waiting.
            engine.cancel("7")
            engine.cancel("long gone")
    assert len(generated.pop("0")) == 6
    assert generated.pop("7") == []
    for identifier, tokens in generated.items():
        assert tokens == expected(references["wide"], requests[int(identifier)])
    engine.unload("wide")


def test_an_adapter_stays_while_requests_use_it(
    engine: Engine, adapters: Mapping[str, Path]
) -> None:
    engine.submit("a", GenerateRequest(PROMPT, max_tokens=5, adapter="wide"))
    for refused in (lambda: engine.unload("wide"), lambda: engine.load("wide", adapters["narrow"])):
        with pytest.raises(AdapterRefused, match="using the adapter: 1"):
            refused()
    while not engine.idle:
        engine.step()
    engine.unload("wide")
    with pytest.raises(AdapterRefused, match="no adapter"):
        engine.unload("wide")


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest((), 5), "0 prompt tokens"),
        (GenerateRequest((5,) * 256, 5), "256 prompt tokens"),
        (GenerateRequest((5, 261), 5), "vocabulary"),
        (GenerateRequest((5, -1), 5), "vocabulary"),
        (GenerateRequest((5,), -1), "max_tokens"),
        (GenerateRequest((5,), 5, adapter="nobody"), "no adapter"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_before_it_joins(
    engine: Engine, request_: GenerateRequest, message: str
) -> None:
    with pytest.raises(RequestRefused, match=message):
        engine.submit("a", request_)
    assert engine.idle


@pytest.mark.parametrize("prompt_tokens", [2000, 9])
def test_a_request_whose_numbers_explode_fails_alone_and_leaves_nothing_in_its_row(
    base: Path,
    adapters: Mapping[str, Path],
    references: Mapping[str | None, Any],
    tmp_path: Path,
    prompt_tokens: int,
) -> None:
    sick = exploding(adapters["narrow"], tmp_path / "sick")
    engine = build(base, {"sick": sick}, rows=2, prompt_tokens=prompt_tokens)
    long, short = GenerateRequest((9,) * 90, max_tokens=30), GenerateRequest(PROMPT, max_tokens=9)
    engine.submit("long", long)
    engine.submit("sick", GenerateRequest((8,) * 80, max_tokens=5, adapter="sick"))
    engine.submit("short", short)
    generated: dict[str, list[int]] = {"long": [], "short": []}
    failed: list[tuple[str, str]] = []
    while not engine.idle:
        result = engine.step()
        failed += result.failed
        for identifier, token in result.tokens:
            generated[identifier].append(token)
    assert failed == [("sick", "the model's output is not finite")]
    assert generated == {
        "long": expected(references[None], long),
        "short": expected(references[None], short),
    }


@pytest.mark.parametrize("left", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("ends", ["done", "cancelled"])
@torch.inference_mode()
def test_numbers_that_a_request_leaves_in_its_row_reach_no_other(
    base: Path, references: Mapping[str | None, Any], left: float, ends: str
) -> None:
    """An adapter can be made so that its own answer is finite, and keys or values of its prompt are not."""
    engine = build(base, {}, rows=2)
    long = GenerateRequest((8,) * 60, max_tokens=3, queue="theirs")
    first, second = (GenerateRequest(PROMPT, max_tokens=n, queue="ours") for n in (30, 40))
    for name in ("one", "two"):
        engine.submit(name, long)
    engine.step()
    for layer in engine._cache._layers:
        layer.keys[..., :60] = left
        layer.values[:, :, :60] = left
    if ends == "cancelled":
        engine.cancel("one")
        engine.cancel("two")
    while not engine.idle:
        engine.step()
    requests = [first] if ends == "done" else [first, second]
    assert run(engine, requests) == [expected(references[None], one) for one in requests]


@torch.inference_mode()
def test_they_reach_no_request_that_moves_into_the_row_either(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=2)
    moved = GenerateRequest(PROMPT, max_tokens=30)
    engine.submit("theirs", GenerateRequest((8,) * 60, max_tokens=1))
    engine.submit("moved", moved)
    tokens = [token for identifier, token in engine.step().tokens if identifier == "moved"]
    assert engine._sequences["moved"].slot == 1
    for layer in engine._cache._layers:
        layer.keys[0, ..., :60] = layer.values[0, :, :60] = float("inf")
    engine._resize(1, 80)
    while not engine.idle:
        tokens += [token for _, token in engine.step().tokens]
    assert tokens == expected(references[None], moved)


def test_fifty_adapters_share_a_few_rows(base: Path, adapters: Mapping[str, Path]) -> None:
    engine = build(
        base, {f"{name}-{n}": path for n in range(25) for name, path in adapters.items()}, rows=5
    )
    requests = [
        GenerateRequest(PROMPT, max_tokens=6, adapter=f"{name}-{n}")
        for n in range(25)
        for name in adapters
    ]
    answers = run(engine, requests)
    assert len({tuple(answer) for answer in answers[0::2]}) == 1
    assert len({tuple(answer) for answer in answers[1::2]}) == 1
    assert answers[0] != answers[1]
