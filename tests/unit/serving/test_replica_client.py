"""The gateway's end of the protocol, against real replica processes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.serving.conftest import ENDLESS_TOKENS, PATIENCE_S, StartReplica
from tuneship.serving.replica_client import (
    FinishReason,
    GenerateRequest,
    ReplicaLost,
    ReplicaRefused,
    RequestTooLarge,
    SocketLink,
    TokenStream,
)

pytestmark = pytest.mark.slow

PROMPT = (10, 20, 30, 40)
ENDLESS = GenerateRequest(PROMPT, ENDLESS_TOKENS)


async def collect(generation: TokenStream) -> list[int]:
    async with generation:
        return [token async for chunk in generation for token in chunk]


def test_the_gateways_end_never_loads_torch() -> None:
    code = "import sys, tuneship.serving.replica_client; sys.exit(any(m in sys.modules for m in ('torch', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_thirty_two_requests_at_once_get_their_own_adapters_answer(
    start_replica: StartReplica, adapters: dict[str, Path]
) -> None:
    async def scenario() -> None:
        async with start_replica() as process:
            for name, path in adapters.items():
                await process.line.load(name, path)
            names = [None, "wide", "narrow"]
            alone = {
                name: await collect(
                    process.line.generate(GenerateRequest(PROMPT, 20, adapter=name))
                )
                for name in names
            }
            assert len({tuple(tokens) for tokens in alone.values()}) == 3
            requests = [GenerateRequest(PROMPT, 20, adapter=names[i % 3]) for i in range(32)]
            together = await asyncio.gather(*(collect(process.line.generate(r)) for r in requests))
            assert together == [alone[request.adapter] for request in requests]

    asyncio.run(scenario())


def test_a_queue_longer_than_the_rows_drains(start_replica: StartReplica) -> None:
    async def scenario() -> None:
        async with start_replica("--rows", "3") as process:
            requests = [GenerateRequest(PROMPT, 5 + i % 7) for i in range(40)]
            generations = [process.line.generate(request) for request in requests]
            answers = await asyncio.gather(*map(collect, generations))
            assert [len(answer) for answer in answers] == [
                request.max_tokens for request in requests
            ]
            assert all(
                generation.finish_reason is FinishReason.LENGTH for generation in generations
            )

    asyncio.run(scenario())


def test_hanging_up_does_not_wait_for_a_replica_that_reads_nothing() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            facts = {"pid": 1, "parameters": 1, "context_length": 8, "vocabulary": 8, "dtype": "a"}
            theirs.sendall(json.dumps({"ready": facts}).encode() + b"\n")
            line = await SocketLink.open(ours)
            asked = [line.generate(GenerateRequest(PROMPT * 50_000, 1)) for _ in range(8)]
            async with asyncio.timeout(60):
                await line.aclose()
            for one in asked:
                with pytest.raises(ReplicaLost):
                    await collect(one)

    asyncio.run(scenario())


def test_killing_the_replica_loses_every_request_in_flight_and_all_later_ones(
    start_replica: StartReplica, long_base: Path
) -> None:
    async def scenario() -> None:
        async with start_replica("--rows", "2", model=long_base) as process:
            generations = [process.line.generate(ENDLESS) for _ in range(8)]
            await anext(generations[0])
            process.popen.kill()
            outcomes = await asyncio.gather(*map(collect, generations), return_exceptions=True)
            assert all(isinstance(outcome, ReplicaLost) for outcome in outcomes)
            with pytest.raises(ReplicaLost):
                await collect(process.line.generate(GenerateRequest(PROMPT, 1)))
            with pytest.raises(ReplicaLost):
                await process.line.stats()
            assert isinstance(await process.line.wait_lost(), ReplicaLost)

    asyncio.run(scenario())


def test_closing_a_generation_early_frees_its_row_for_the_next(
    start_replica: StartReplica, long_base: Path
) -> None:
    async def scenario() -> None:
        async with start_replica("--rows", "1", model=long_base) as process:
            async with process.line.generate(ENDLESS) as endless:
                await anext(endless)
                assert (await process.line.stats())["running"] == 1
            stats = await process.line.stats()
            assert (stats["running"], stats["waiting"]) == (0, 0)
            assert len(await collect(process.line.generate(GenerateRequest(PROMPT, 3)))) == 3

    asyncio.run(scenario())


def test_a_bad_adapter_is_refused_and_the_replica_lives(
    start_replica: StartReplica, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_replica() as process:
            with pytest.raises(ReplicaRefused, match="cannot be read"):
                await process.line.load("missing", tmp_path / "nowhere")
            with pytest.raises(ReplicaRefused, match="no adapter"):
                await collect(process.line.generate(GenerateRequest(PROMPT, 3, adapter="missing")))
            assert len(await collect(process.line.generate(GenerateRequest(PROMPT, 3)))) == 3

    asyncio.run(scenario())


def test_an_adapter_in_use_is_not_unloaded(
    start_replica: StartReplica, long_base: Path, adapters: dict[str, Path]
) -> None:
    async def scenario() -> None:
        async with start_replica(model=long_base) as process:
            await process.line.load("wide", adapters["wide"])
            async with process.line.generate(replace(ENDLESS, adapter="wide")) as running:
                await anext(running)
                with pytest.raises(ReplicaRefused, match="requests are using the adapter: 1"):
                    await process.line.unload("wide")
            await process.line.unload("wide")
            assert (await process.line.stats())["adapters"] == 0

    asyncio.run(scenario())


def test_a_prompt_that_fills_the_context_is_refused(start_replica: StartReplica) -> None:
    async def scenario() -> None:
        async with start_replica() as process:
            length = process.line.facts.context_length
            with pytest.raises(ReplicaRefused, match=f"{length} prompt tokens"):
                await collect(process.line.generate(GenerateRequest((7,) * length, 3)))
            last = process.line.generate(GenerateRequest((7,) * (length - 1), 3))
            assert len(await collect(last)) == 1
            assert last.finish_reason is FinishReason.LENGTH

    asyncio.run(scenario())


def test_a_request_that_needs_more_than_all_memory_is_refused_and_the_others_wait_for_room(
    start_replica: StartReplica,
) -> None:
    async def scenario() -> None:
        async with start_replica("--cache-bytes", str(100 * 2 * 2 * 2 * 8 * 4)) as process:
            stats = await process.line.stats()
            tokens = stats["cache_limit_bytes"] // (2 * 2 * 2 * 8 * 4)
            with pytest.raises(RequestTooLarge, match=f"holds {tokens}"):
                await collect(process.line.generate(GenerateRequest(PROMPT, tokens)))
            requests = [GenerateRequest(PROMPT, 20) for _ in range(12)]
            answers = await asyncio.gather(*(collect(process.line.generate(r)) for r in requests))
            assert [len(answer) for answer in answers] == [20] * 12

    asyncio.run(scenario())


def test_hanging_up_ends_the_process(start_replica: StartReplica) -> None:
    async def scenario() -> int:
        async with start_replica() as process:
            await process.line.aclose()
            return await asyncio.to_thread(process.popen.wait, PATIENCE_S)

    assert asyncio.run(scenario()) == 0


def test_a_termination_signal_ends_the_process_even_when_it_is_busy(
    start_replica: StartReplica, long_base: Path
) -> None:
    async def scenario() -> int:
        async with start_replica(model=long_base) as process:
            endless = process.line.generate(ENDLESS)
            await anext(endless)
            os.kill(process.popen.pid, signal.SIGTERM)
            return await asyncio.to_thread(process.popen.wait, PATIENCE_S)

    assert asyncio.run(scenario()) == 0


def test_a_directory_without_a_model_is_refused_with_the_reason(
    start_replica: StartReplica, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with start_replica(model=tmp_path):
            pass

    with pytest.raises(ReplicaRefused, match=r"config\.json"):
        asyncio.run(scenario())


def test_a_caller_waiting_for_the_whole_answer_is_woken_once() -> None:
    async def wait() -> None:
        generation = TokenStream(lambda: None)
        whole = asyncio.create_task(generation.read_all())
        for token in (5, 6, 7):
            await asyncio.sleep(0)
            generation.add(token)
        assert not generation._changed.is_set()
        generation.finish(FinishReason.STOP)
        assert await whole == [5, 6, 7]

    asyncio.run(wait())


def test_a_caller_waiting_for_the_whole_answer_hears_of_a_lost_replica() -> None:
    async def wait() -> None:
        generation = TokenStream(lambda: None)
        whole = asyncio.create_task(generation.read_all())
        await asyncio.sleep(0)
        generation.add(5)
        generation.fail(ReplicaLost("gone"))
        with pytest.raises(ReplicaLost, match="gone"):
            await whole

    asyncio.run(wait())
