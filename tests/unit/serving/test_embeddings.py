"""Embeddings are the hidden states that transformers and peft compute, pooled; and they disturb nobody."""

import asyncio
import base64
import socket
import threading
from array import array
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.waiting import until
from tests.unit.serving.conftest import exploding, make_adapter, quiet_peft
from tests.unit.serving.test_configurations import PHI3
from tests.unit.serving.test_engine import build, expected, run
from tests.unit.serving.test_generic import TURNS, WINDOW, save
from tuneship.serving.adapters import AdapterRefused
from tuneship.serving.embed_request import EmbedRequest, Pooling
from tuneship.serving.embeddings import STEPS_BETWEEN_BACKGROUND_PASSES, Embedder
from tuneship.serving.engine import RequestRefused, SequenceTooLarge
from tuneship.serving.replica import Frames, ReplicaServer
from tuneship.serving.replica_client import (
    GenerateRequest,
    ReplicaFacts,
    ReplicaLost,
    ReplicaRefused,
    RequestTooLarge,
    SocketLink,
)

# Texts shorter and longer than a pass of 20 tokens, and of the window.
TEXTS = tuple(tuple(range(9, 10 + length)) for length in (1, 20, 50, 7))
PASS_TOKENS = 20


def vector_of(content: str) -> Tensor:
    return torch.tensor(array("f", base64.b64decode(content)))


def embedded(embedder: Embedder, *requests: EmbedRequest) -> list[list[Tensor]]:
    """The vectors of requests that are submitted together."""
    found: list[dict[int, Tensor]] = [{} for _ in requests]
    for number, request in enumerate(requests):
        embedder.submit(str(number), request)
    while not embedder.idle:
        result = embedder.step()
        assert not result.failed
        for identifier, number, content in result.vectors:
            found[int(identifier)][number] = vector_of(content)
    return [[vectors[number] for number in range(len(vectors))] for vectors in found]


def reference_vectors(reference: Any, request: EmbedRequest) -> list[Tensor]:
    found: list[Tensor] = []
    for text in request.texts:
        with torch.no_grad():
            output = reference(input_ids=torch.tensor([text]), output_hidden_states=True)
        states = output.hidden_states[-1][0]
        pooled = states.mean(0) if request.pooling is Pooling.MEAN else states[-1]
        cut = torch.nn.functional.normalize(pooled, dim=0)[: request.dimensions]
        found.append(torch.nn.functional.normalize(cut, dim=0))
    return found


def check_same(actual: list[Tensor], wanted: list[Tensor]) -> None:
    torch.testing.assert_close(torch.stack(actual), torch.stack(wanted), rtol=0, atol=1e-4)


@pytest.mark.parametrize("pooling", Pooling)
def test_vectors_are_the_pooled_hidden_states_of_transformers_and_of_peft(
    base: Path,
    adapters: Mapping[str, Path],
    references: Mapping[str | None, Any],
    pooling: Pooling,
) -> None:
    embedder = Embedder(build(base, adapters, rows=2, prompt_tokens=PASS_TOKENS))
    requests = [
        EmbedRequest(TEXTS, name, pooling, dimensions)
        for name, dimensions in ((None, None), ("wide", 32), ("narrow", 5))
    ]
    for request, vectors in zip(requests, embedded(embedder, *requests), strict=True):
        check_same(vectors, reference_vectors(references[request.adapter], request))
        assert all(len(vector) == (request.dimensions or 32) for vector in vectors)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("mistral", WINDOW, marks=pytest.mark.slow),
        pytest.param("qwen3", {"head_dim": 16}, marks=pytest.mark.slow),
        ("gemma2", {**WINDOW, **TURNS, "head_dim": 8}),
        ("phi3", PHI3),
    ],
)
def test_every_architecture_has_the_vectors_of_transformers_and_of_peft(
    tmp_path: Path, kind: str, options: dict[str, object]
) -> None:
    from peft import PeftModel

    reference = save(tmp_path / "base", kind, **options)
    adapter = make_adapter(
        tmp_path / "base", tmp_path / "adapter", r=4, target_modules="all-linear", seed=3
    )
    engine = build(tmp_path / "base", {"a": adapter}, rows=2, prompt_tokens=PASS_TOKENS)
    plain, tuned = EmbedRequest(TEXTS), EmbedRequest(TEXTS, adapter="a")
    vectors = embedded(Embedder(engine), plain, tuned)
    check_same(vectors[0], reference_vectors(reference, plain))
    with quiet_peft():
        peft = PeftModel.from_pretrained(reference, adapter)
    check_same(vectors[1], reference_vectors(peft, tuned))


def test_other_texts_in_a_pass_change_a_vector_by_no_more_than_rounding(
    base: Path, adapters: Mapping[str, Path]
) -> None:
    embedder = Embedder(build(base, adapters, rows=2))
    alone = [embedded(embedder, EmbedRequest((text,), "wide"))[0][0] for text in TEXTS]
    others = [EmbedRequest(TEXTS[::-1], name) for name in ("narrow", None)]
    together = embedded(embedder, EmbedRequest(TEXTS, "wide"), *others)[0]
    torch.testing.assert_close(torch.stack(together), torch.stack(alone), rtol=0, atol=1e-6)


def test_generations_beside_embeddings_answer_as_they_do_alone_and_keep_their_prefixes(
    base: Path, adapters: Mapping[str, Path], references: Mapping[str | None, Any]
) -> None:
    engine = build(base, adapters, rows=2, prompt_tokens=PASS_TOKENS)
    embedder = Embedder(engine)
    request = GenerateRequest(tuple(range(9, 60)), 12)
    run(engine, [request])
    embedder.submit("texts", EmbedRequest(TEXTS * 3, "wide"))
    engine.submit("0", request)
    generated: list[int] = []
    while not engine.idle:
        generated += [token for _, token in engine.step().tokens]
        embedder.step()
    assert generated == expected(references[None], request)
    assert engine.stats()["reused_tokens"] == 50, "the first answer left its prompt in the cache"


def test_texts_in_the_background_wait_for_all_others_and_have_smaller_passes(base: Path) -> None:
    embedder = Embedder(build(base, {}, rows=2, prompt_tokens=8 * PASS_TOKENS))
    embedder.submit("night", EmbedRequest(((9,) * 10,) * 5, is_background=True))
    embedder.step()
    embedder.submit("day", EmbedRequest(((9,) * 80,) * 4))
    assert embedder.waiting == 1
    passes = [[identifier for identifier, *_ in embedder.step().vectors] for _ in range(4)]
    assert passes == [["day"] * 2, ["day"] * 2, ["night"] * 2, ["night"]]
    assert embedder.idle


def test_texts_in_the_background_leave_most_steps_to_sequences(base: Path) -> None:
    embedder = Embedder(build(base, {}, rows=2, prompt_tokens=8 * PASS_TOKENS))
    text, every = (9,) * PASS_TOKENS, STEPS_BETWEEN_BACKGROUND_PASSES
    embedder.submit("night", EmbedRequest((text,) * 3, is_background=True))
    passed = [bool(embedder.step(is_beside_sequences=True).vectors) for _ in range(2 * every)]
    assert passed == 2 * [*[False] * (every - 1), True]
    embedder.submit("day", EmbedRequest((text,)))
    assert embedder.step(is_beside_sequences=True).vectors[0][0] == "day"
    assert embedder.step().vectors[0][0] == "night"


def test_a_long_text_in_the_background_has_the_same_vector(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    embedder = Embedder(build(base, {}, rows=2, prompt_tokens=PASS_TOKENS))
    request = EmbedRequest(TEXTS, is_background=True)
    check_same(embedded(embedder, request)[0], reference_vectors(references[None], request))


def test_a_tenant_with_many_texts_does_not_hold_up_one_with_few(base: Path) -> None:
    embedder = Embedder(build(base, {}, rows=2, prompt_tokens=PASS_TOKENS))
    embedder.submit("many", EmbedRequest(((9,) * 10,) * 40, owner="a"))
    embedder.step()
    embedder.submit("few", EmbedRequest(((9,) * 10,), owner="b"))
    passes = [embedder.step() for _ in range(2)]
    assert "few" in [identifier for one in passes for identifier, *_ in one.vectors]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (EmbedRequest(()), "no text"),
        (EmbedRequest(((9,), ())), "an empty one"),
        (EmbedRequest(((9,) * 257,)), "257 tokens, the context holds 256"),
        (EmbedRequest(((9, 261),)), "not in the vocabulary"),
        (EmbedRequest(((-1,),)), "not in the vocabulary"),
        (EmbedRequest(((9,),), adapter="gone"), "no adapter of this name"),
        (EmbedRequest(((9,),), dimensions=33), "from 1 to 32"),
    ],
)
def test_a_request_that_cannot_be_answered_is_refused_before_it_waits(
    base: Path, request_: EmbedRequest, message: str
) -> None:
    embedder = Embedder(build(base, {}, rows=2))
    with pytest.raises(RequestRefused, match=message):
        embedder.submit("a", request_)
    assert embedder.idle


def test_a_text_that_needs_more_memory_than_the_cache_may_have_is_refused(base: Path) -> None:
    engine = build(base, {}, rows=2)
    limited = build(base, {}, rows=2, cache_bytes=100 * engine.model.facts.cache.token_bytes)
    with pytest.raises(SequenceTooLarge, match=r"101 tokens of a text, .* holds 100"):
        Embedder(limited).submit("a", EmbedRequest(((9,) * 101,)))


def test_a_request_whose_numbers_explode_fails_alone(
    base: Path, adapters: Mapping[str, Path], tmp_path: Path
) -> None:
    sick = exploding(adapters["narrow"], tmp_path / "sick")
    embedder = Embedder(build(base, {"sick": sick}, rows=2))
    embedder.submit("sick", EmbedRequest(TEXTS, "sick"))
    embedder.submit("well", EmbedRequest(TEXTS))
    result = embedder.step()
    assert result.failed == [("sick", "the model's output is not finite")]
    assert len([one for one in result.vectors if one[0] == "well"]) == len(TEXTS)
    assert embedder.idle


def test_an_adapter_stays_until_the_last_request_for_its_vectors_has_ended(
    base: Path, adapters: Mapping[str, Path]
) -> None:
    engine = build(base, adapters, rows=2, prompt_tokens=PASS_TOKENS)
    embedder = Embedder(engine)
    for name in ("a", "b"):
        embedder.submit(name, EmbedRequest(TEXTS, "wide"))
    embedder.cancel("a")
    with pytest.raises(AdapterRefused):
        engine.unload("wide")
    while embedder.requests:
        embedder.step()
    engine.unload("wide")


def test_a_cancelled_request_leaves_nothing_behind(base: Path) -> None:
    embedder = Embedder(build(base, {}, rows=2, prompt_tokens=PASS_TOKENS))
    embedder.submit("long", EmbedRequest(((9,) * 50,) * 3))
    embedder.step()
    embedder.submit("next", EmbedRequest(((9,),)))
    embedder.cancel("long")
    embedder.cancel("long")
    assert [one[0] for one in embedder.step().vectors] == ["next"]
    assert embedder.idle


@asynccontextmanager
async def line_to(server_of: Any) -> AsyncIterator[tuple[SocketLink, ReplicaServer]]:
    """A line to a replica server in a thread of this process."""
    ours, theirs = socket.socketpair()
    server = ReplicaServer(server_of, Frames(theirs))
    worker = threading.Thread(target=server.run, daemon=True)
    reader, writer = await asyncio.open_connection(sock=ours)
    line = SocketLink(reader, writer, ReplicaFacts(1, 1, 256, 261, "float32"), 60.0)
    with theirs:
        worker.start()
        yield line, server
        await line.aclose()
        await asyncio.to_thread(worker.join)


def test_vectors_come_over_the_socket_in_the_order_of_the_texts(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    request = EmbedRequest(TEXTS * 3, pooling=Pooling.LAST, dimensions=7)

    async def scenario() -> list[list[str]]:
        async with line_to(build(base, {}, rows=2)) as (line, _):
            return await asyncio.gather(*(line.embed(request) for _ in range(3)))

    one = EmbedRequest(TEXTS, pooling=request.pooling, dimensions=request.dimensions)
    wanted = reference_vectors(references[None], one)
    for vectors in asyncio.run(scenario()):
        check_same([vector_of(content) for content in vectors], wanted * 3)


def test_a_refusal_and_a_cancelled_caller_leave_the_line_free(base: Path) -> None:
    async def scenario() -> None:
        engine = build(base, {}, rows=2, prompt_tokens=1, cache_bytes=1 << 15)
        async with line_to(engine) as (line, server):
            with pytest.raises(ReplicaRefused, match="vocabulary"):
                await line.embed(EmbedRequest(((1 << 20,),)))
            with pytest.raises(RequestTooLarge, match="the memory for them"):
                await line.embed(EmbedRequest(((9,) * 256,)))
            with pytest.raises(ReplicaRefused, match="not understood"):
                await line.embed(EmbedRequest(((9.5,),)))  # type: ignore[arg-type]
            embedding = asyncio.ensure_future(line.embed(EmbedRequest(((9,),) * 50_000)))
            await asyncio.to_thread(until, lambda: server._embedder.requests)
            assert line.in_flight == 1
            embedding.cancel()
            await asyncio.gather(embedding, return_exceptions=True)
            assert line.in_flight == 0
            await asyncio.to_thread(until, lambda: not server._embedder.requests)

    asyncio.run(scenario())


def test_a_lost_replica_fails_its_embeddings(base: Path) -> None:
    async def scenario() -> None:
        async with line_to(build(base, {}, rows=2, prompt_tokens=1)) as (line, server):
            embedding = asyncio.ensure_future(line.embed(EmbedRequest(((9,),) * 50_000)))
            await asyncio.to_thread(until, lambda: server._embedder.requests)
            await line.aclose()
            with pytest.raises(ReplicaLost):
                await embedding
            with pytest.raises(ReplicaLost):
                await line.embed(EmbedRequest(((9,),)))

    asyncio.run(scenario())
