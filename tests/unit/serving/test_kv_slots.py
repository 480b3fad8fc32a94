"""Prompts whose beginning is in the cache get the same answers as without the cache, and reuse only what is equal."""

import copy
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.serving.conftest import exploding
from tests.unit.serving.test_engine import build, expected, run
from tuneship.serving.adapters import AdapterRefused
from tuneship.serving.batch import FlatBatch, PrefillChunk
from tuneship.serving.engine import Engine, EngineLimits, RequestRefused
from tuneship.serving.kv_cache import SlotCache
from tuneship.serving.kv_slots import MIN_PREFIX_TOKENS, Copy, KvSlots
from tuneship.serving.models.model import CausalModel
from tuneship.serving.replica import load_model
from tuneship.serving.sequence import GenerateRequest, Sequence

QUESTION = tuple(range(20, 50))
OTHER_QUESTION = tuple(range(150, 190))


def ask(
    *end: int,
    adapter: str | None = None,
    tokens: int = 6,
    question: tuple[int, ...] = QUESTION,
    **options: Any,
) -> GenerateRequest:
    return GenerateRequest(question + end, tokens, adapter=adapter, **options)


def reused(engine: Engine) -> int:
    return engine.stats()["reused_tokens"]


def test_a_lone_prompt_that_begins_like_the_one_before_it_computes_the_rest(
    base: Path, adapters: Mapping[str, Path], references: Mapping[str | None, Any]
) -> None:
    engine = build(base, adapters, rows=4)
    known = 0
    for request, shared in [
        (ask(7, 8), 0),
        (ask(9), len(QUESTION)),
        # All of this prompt is cached. Only its last token is computed, to find the next one.
        (ask(9), len(QUESTION)),
        (ask(9, adapter="wide"), 0),
        (ask(7, adapter="wide"), len(QUESTION)),
        # This row held keys of the other model.
        (ask(7, 8), 0),
    ]:
        assert run(engine, [request]) == [expected(references[request.adapter], request)]
        known += shared
        assert reused(engine) == known


def test_the_next_turn_of_a_conversation_computes_neither_the_first_nor_its_answer(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=4)
    first = ask(7, tokens=20)
    [answer] = run(engine, [first])
    second = ask(7, *answer, 8)
    assert run(engine, [second]) == [expected(references[None], second)]
    # All but the newest token are reused. Nobody has computed its keys yet.
    assert reused(engine) == len(QUESTION) + 20
    stopped = ask(9, tokens=20, stop_tokens=tuple(expected(references[None], ask(9))[3:4]))
    [answer] = run(engine, [stopped])
    again = ask(9, *answer, 8)
    assert run(engine, [again]) == [expected(references[None], again)]


def test_a_wave_finds_what_the_one_before_it_left(
    base: Path, adapters: Mapping[str, Path], references: Mapping[str | None, Any]
) -> None:
    engine = build(base, adapters, rows=6)
    first, second = (
        [ask(start + n, n, adapter=[None, "narrow", "wide"][n // 2]) for n in range(6)]
        for start in (60, 70)
    )
    assert run(engine, first) == [expected(references[one.adapter], one) for one in first]
    # They came together, so there was no row to copy from.
    assert reused(engine) == 0
    assert run(engine, second) == [expected(references[one.adapter], one) for one in second]
    assert reused(engine) == 6 * len(QUESTION)


@pytest.mark.parametrize(("joining", "prompt_tokens"), [(1, 2000), (3, 17), (1000, 17)])
def test_mixed_requests_that_come_and_go_answer_as_if_they_were_alone(
    base: Path,
    adapters: Mapping[str, Path],
    references: Mapping[str | None, Any],
    joining: int,
    prompt_tokens: int,
) -> None:
    """Rows move, prompts enter whole or in parts, and sources are overwritten."""
    engine = build(base, adapters, rows=5, prompt_tokens=prompt_tokens)
    draws = random.Random(joining)  # noqa: S311 (test data)
    requests = [
        ask(
            *(draws.randrange(5, 261) for _ in range(draws.randrange(1, 50))),
            question=draws.choice([QUESTION, OTHER_QUESTION, QUESTION + OTHER_QUESTION]),
            adapter=draws.choice([None, "wide", "narrow"]),
            tokens=draws.randrange(1, 12),
        )
        for _ in range(20)
    ]
    answers = run(engine, requests, joining=joining)
    assert answers == [expected(references[one.adapter], one) for one in requests]
    assert reused(engine) >= 3 * len(QUESTION)


def test_another_deployment_does_not_feel_what_was_asked(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=4)
    for queue, shared in [("a", 0), ("b", 0), ("b", len(QUESTION)), ("a", 0)]:
        before = reused(engine)
        request = ask(7, queue=queue)
        assert run(engine, [request]) == [expected(references[None], request)]
        assert reused(engine) - before == shared


def test_an_adapter_of_the_same_name_does_not_use_what_its_predecessor_computed(
    base: Path, adapters: Mapping[str, Path], references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {"a": adapters["wide"]}, rows=4)
    request = ask(7, adapter="a")
    assert run(engine, [request]) == [expected(references["wide"], request)]
    engine.load("a", adapters["narrow"])
    assert run(engine, [request]) == [expected(references["narrow"], request)]
    engine.unload("a")
    engine.load("a", adapters["wide"])
    assert run(engine, [request]) == [expected(references["wide"], request)]
    assert reused(engine) == 0


def test_values_that_are_not_finite_are_not_used_again(
    base: Path, adapters: Mapping[str, Path], tmp_path: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {"sick": exploding(adapters["narrow"], tmp_path / "sick")}, rows=2)
    for _ in range(2):
        engine.submit("sick", ask(7, adapter="sick"))
        assert engine.step().failed
    assert reused(engine) == 0
    assert run(engine, [ask(7)]) == [expected(references[None], ask(7))]


def test_nothing_of_a_cancelled_prompt_is_used_that_nobody_looked_at(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=3, prompt_tokens=10)
    long = ask(*range(100, 200))
    # Cancelling clears the row, with what was there before.
    for known in (0, len(QUESTION)):
        engine.submit("cancelled", long)
        for _ in range(3):
            assert not engine.step().tokens
        assert reused(engine) == known
        engine.cancel("cancelled")
        assert run(engine, [ask(7)]) == [expected(references[None], ask(7))]
        assert reused(engine) == known


def test_the_prompt_and_the_generated_tokens_of_a_cancelled_answer_are_used(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=3)
    engine.submit("cancelled", ask(7, tokens=20))
    generated = [token for _ in range(5) for _, token in engine.step().tokens]
    engine.cancel("cancelled")
    longer = ask(7, *generated, 8)
    assert run(engine, [longer]) == [expected(references[None], longer)]
    assert reused(engine) == len(QUESTION) + 1 + 4


def test_slots_the_cache_released_are_not_used(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=4, kept_bytes=0)
    assert run(engine, [ask(7)]) == [expected(references[None], ask(7))]
    assert run(engine, [ask(8)]) == [expected(references[None], ask(8))]
    assert reused(engine) == len(QUESTION)
    engine.shrink()
    assert engine.stats()["cache_bytes"] == 0
    assert run(engine, [ask(9)]) == [expected(references[None], ask(9))]
    assert reused(engine) == len(QUESTION)


def test_a_cache_that_grows_keeps_what_it_holds_and_one_that_gives_up_rows_forgets_them(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    model = load_model(base)
    limits = EngineLimits(slots=4, cache_bytes=200 * model.facts.cache.token_bytes)
    engine = Engine(model, limits)
    first = [ask(n, question=q, tokens=3) for q in (QUESTION, OTHER_QUESTION) for n in (60, 61)]
    assert run(engine, first) == [expected(references[None], one) for one in first]
    assert reused(engine) == 0
    # This one is so long that only its own row stays.
    long = ask(*range(90, 130), tokens=20)
    second = [long, ask(62, question=OTHER_QUESTION), ask(63)]
    assert run(engine, second, joining=1) == [expected(references[None], one) for one in second]
    # The long one reuses a row of the first, and the last one reuses the row of the long one.
    assert reused(engine) == 2 * len(QUESTION)


TOKENS = tuple(range(100))


@pytest.fixture
def rows() -> KvSlots:
    """Return four rows that are empty."""
    rows = KvSlots()
    assert rows.resize(4, 100) == []
    return rows


def join(rows: KvSlots, tokens: tuple[int, ...], **options: Any) -> Sequence:
    """Add a sequence whose prompt has entered. Tokens that were not copied count as computed."""
    sequence = Sequence("a", GenerateRequest(tokens, 9, **options), 9)
    copied = rows.assign(sequence)
    rows.register(sequence)
    sequence.cached = 0 if copied is None else copied.length
    return sequence


def found(rows: KvSlots, tokens: tuple[int, ...], **options: Any) -> Copy | None:
    """Return what a sequence that leaves at once could copy."""
    sequence = Sequence("a", GenerateRequest(tokens, 9, **options), 9)
    copied = rows.assign(sequence)
    rows.register(sequence)
    rows.release(sequence)
    return copied


def test_the_longest_common_beginning_is_found_and_its_own_row_when_nobody_runs_there(
    rows: KvSlots,
) -> None:
    first = join(rows, TOKENS[:40])
    second = join(rows, (*TOKENS[:60], 7))
    assert (first.slot, second.slot, second.cached) == (0, 1, 40)
    assert found(rows, (*TOKENS[:50], 8)) == Copy(1, 2, 50)
    assert found(rows, (*TOKENS[:50], 9)) == Copy(2, 2, 50)
    assert found(rows, TOKENS) == Copy(1, 3, 60)
    assert found(rows, TOKENS[:MIN_PREFIX_TOKENS]) is None
    rows.release(first)
    assert found(rows, TOKENS[: MIN_PREFIX_TOKENS + 1]) == Copy(3, 3, MIN_PREFIX_TOKENS)
    assert found(rows, TOKENS[: MIN_PREFIX_TOKENS - 1]) is None


def test_a_request_without_a_match_gets_an_empty_slot_or_the_one_left_first(rows: KvSlots) -> None:
    ran = [join(rows, TOKENS, queue=queue) for queue in "abcd"]
    for place in (2, 0, 3):
        rows.release(ran[place])
    assert join(rows, TOKENS, queue="e").slot == ran[2].slot
    rows.invalidate(ran[1].slot)
    rows.release(ran[1])
    assert join(rows, TOKENS, queue="f").slot == ran[1].slot
    assert found(rows, TOKENS, queue="a") == Copy(ran[0].slot, ran[0].slot, 99)
    assert found(rows, TOKENS, queue="d") == Copy(ran[3].slot, ran[3].slot, 99)


def test_as_many_deployments_as_rows_find_their_own_whoever_comes_first(
    rows: KvSlots,
) -> None:
    ran = {queue: join(rows, TOKENS, queue=queue) for queue in "abcd"}
    for order in ("dbca", "abdc", "cabd"):
        for queue in order:
            rows.release(ran[queue])
        for queue in reversed(order):
            before, ran[queue] = ran[queue], join(rows, (*TOKENS[:50], 7), queue=queue)
            assert (ran[queue].slot, ran[queue].cached) == (before.slot, 50)


def test_slots_beyond_the_storage_are_forgotten_and_requests_running_there_move(
    rows: KvSlots,
) -> None:
    ran = [join(rows, TOKENS, queue=queue) for queue in "abcd"]
    rows.release(ran[0])
    rows.release(ran[2])
    ran[3].cached, ran[3].generated = 100, [5]
    assert rows.resize(2, 30) == [Copy(3, 0, 101)]
    assert (ran[1].slot, ran[3].slot) == (1, 0)
    assert rows.resize(4, 200) == []
    assert found(rows, TOKENS, queue="a") is None
    assert found(rows, TOKENS, queue="c") is None
    assert found(rows, TOKENS, queue="d") == Copy(0, 2, 30)
    rows.invalidate(0)
    assert found(rows, TOKENS, queue="b") == Copy(1, 3, 30)


@pytest.fixture(scope="module")
def model(base: Path) -> CausalModel:
    return load_model(base)


SUBMIT = st.tuples(
    st.just("submit"),
    st.sampled_from([None, "a", "b"]),
    st.sampled_from([QUESTION, OTHER_QUESTION[:20], QUESTION + OTHER_QUESTION]),
    st.integers(1, 8),
)
STEPS = st.tuples(st.just("steps"), st.integers(1, 6))
REST = st.tuples(st.just("rest"))
CANCEL = st.tuples(st.just("cancel"), st.integers(0, 5))
LOAD = st.tuples(st.sampled_from(["load", "unload"]), st.sampled_from("ab"))
EVENTS = st.lists(
    st.one_of(SUBMIT, SUBMIT, STEPS, STEPS, CANCEL, LOAD, REST), min_size=15, max_size=30
)


@settings(max_examples=150)
@given(EVENTS, st.sampled_from([9, 2000]), st.sampled_from([None, 150]))
def test_the_recorded_tokens_of_a_slot_are_those_the_cache_holds(
    model: CausalModel,
    adapters: Mapping[str, Path],
    events: list[tuple[Any, ...]],
    prompt_tokens: int,
    room: int | None,
) -> None:
    """The two agree whatever came, went, moved, grew or shrank before."""
    room_bytes = None if room is None else room * model.facts.cache.token_bytes
    kept_bytes = 60 * model.facts.cache.token_bytes
    engine = Engine(model, EngineLimits(4, prompt_tokens, room_bytes, kept_bytes))
    for number, event in enumerate([("load", "a"), ("load", "b"), *events]):
        happen(engine, adapters, number, event)
        check_rows(engine)


def happen(
    engine: Engine, adapters: Mapping[str, Path], number: int, event: tuple[Any, ...]
) -> None:
    """Apply one event. A refused event must change nothing."""
    with suppress(AdapterRefused, RequestRefused):
        match event:
            case "submit", adapter, question, tokens:
                request = ask(number, adapter=adapter, question=question, tokens=tokens)
                engine.submit(str(number), request)
            case "steps", count:
                for _ in range(count):
                    assert engine.idle or not engine.step().failed
            case ("rest",):
                engine.shrink()
            case "cancel", index:
                engine.cancel("".join(engine.requests[index : index + 1]))
            case "load", adapter:
                engine.load(adapter, adapters["wide" if number % 2 else "narrow"])
            case _, adapter:
                engine.unload(adapter)


def check_rows(engine: Engine) -> None:
    """One token more on what a row holds has the same logits as when all is computed afresh."""
    for slot, cached in engine._slots._cached.items():
        if not cached.valid:
            continue
        adapter, tokens = cached.scope[0], cached.tokens[: cached.valid].tolist()
        own = SlotCache(engine._cache.shape, slots=1, length=len(tokens) + 1)
        own.resize(1, len(tokens) + 1)
        computed = next_logits(engine, own, adapter, [*tokens, 9], slot=0, cached=0)
        copied = copy.deepcopy(engine._cache)
        # A full row has no room for the token within the limits.
        copied.resize(slot + 1, len(tokens) + 1)
        found = next_logits(engine, copied, adapter, [9], slot=slot, cached=len(tokens))
        assert torch.allclose(found, computed, atol=1e-4)


@torch.inference_mode()
def next_logits(
    engine: Engine,
    kv_cache: SlotCache,
    adapter: str | None,
    tokens: list[int],
    slot: int,
    cached: int,
) -> torch.Tensor:
    """Return the logits after tokens that follow the first `cached` tokens of a row."""
    count = len(tokens)
    batch = FlatBatch(
        tokens=torch.tensor(tokens),
        positions=torch.arange(cached, cached + count),
        slots=torch.full((count,), slot),
        logit_indices=torch.tensor([count - 1]),
        decode_slots=(),
        prefills=(PrefillChunk(0, count, slot, cached, cached + count),),
        length=cached + count,
    )
    if adapter is not None:
        engine._lora.acquire(adapter)
    routes = engine._lora.route([], [(adapter, 0, count)])
    try:
        return engine._model.forward(batch, kv_cache, engine._lora, routes)
    finally:
        if adapter is not None:
            engine._lora.release(adapter)
