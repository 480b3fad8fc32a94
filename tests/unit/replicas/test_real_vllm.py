"""The same replicas with a real vLLM, where `TUNESHIP_TEST_VLLM` names its command, e.g. `/opt/vllm/bin/vllm serve`.

This takes minutes and gigabytes, so it is not part of the ordinary suite. Greedy tokens of vLLM are compared with those
of the built-in engine, for the base model and for two adapters.
"""

import asyncio
import os
import shlex
from pathlib import Path

import pytest

from tests.support.waiting import is_alive, until_async
from tests.unit.replicas.test_vllm import tokens_of
from tests.unit.serving.conftest import make_adapter
from tuneship.processes.worker_processes import LocalProcesses
from tuneship.replicas.engine_kinds import VllmServer
from tuneship.replicas.local_replicas import LocalReplicas, process_starter
from tuneship.replicas.replica import StartReplica
from tuneship.replicas.replica_link import Adapter, ReplicaLink
from tuneship.replicas.vllm import vllm_starter
from tuneship.serving.replica_client import FinishReason, GenerateRequest, ReplicaRefused

COMMAND = shlex.split(os.environ.get("TUNESHIP_TEST_VLLM", ""))
pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(not COMMAND, reason="TUNESHIP_TEST_VLLM names no vLLM"),
]
SERVER = VllmServer(tuple(COMMAND), ("--dtype=float32", "--enforce-eager", "--max-model-len=512"))
BASE = Path(__file__).parents[3] / "tuneship" / "base_models" / "tuneship-tiny"
PROMPTS = [tuple(range(start, start + length)) for start, length in ((40, 3), (300, 17), (900, 60))]


def ask(prompt: tuple[int, ...], model: str | None, **more: object) -> GenerateRequest:
    known = {"tokens": prompt, "max_tokens": 24, "adapter": model, "queue": "a deployment"}
    return GenerateRequest(**{**known, **more})


@pytest.fixture
def adapters(tmp_path: Path) -> list[Adapter]:
    make_adapter(BASE, tmp_path / "one", r=8, target_modules="all-linear", seed=1)
    make_adapter(BASE, tmp_path / "two", r=16, target_modules=["q_proj", "v_proj"], seed=2)
    return [Adapter(f"ft:tuneship-tiny:{name}:1", tmp_path / name) for name in ("one", "two")]


async def greedy(
    start_replica: StartReplica, adapters: list[Adapter], log: Path
) -> list[list[int]]:
    group = LocalReplicas(start_replica, BASE, log)
    for adapter in adapters:
        await group.ready(adapter)
    models = [None, *adapters]
    asked = [
        await group.generate(model, ask(prompt, model and model.name))
        for prompt in PROMPTS
        for model in models
    ]
    found = await asyncio.gather(*map(tokens_of, asked))
    await group.close()
    return list(found)


def test_greedy_tokens_equal_those_of_the_built_in_engine(
    tmp_path: Path, adapters: list[Adapter]
) -> None:
    vllm = vllm_starter(LocalProcesses(isolated=True), SERVER)
    found = asyncio.run(greedy(vllm, adapters, tmp_path / "vllm.log"))
    own = asyncio.run(
        greedy(process_starter(LocalProcesses(isolated=True)), adapters, tmp_path / "own.log")
    )
    assert found == own
    assert len({tuple(one) for one in found}) == len(found)


def test_the_whole_life_of_a_replica(tmp_path: Path, adapters: list[Adapter]) -> None:
    async def run() -> None:
        log = tmp_path / "vllm.log"
        opened = await vllm_starter(LocalProcesses(isolated=True), SERVER)(BASE, log)
        link = opened.link
        try:
            plain = await tokens_of(link.generate(ask(PROMPTS[0], None)))
            stopped = link.generate(ask(PROMPTS[0], None, stop_tokens=(plain[5],)))
            assert await tokens_of(stopped) == plain[: plain.index(plain[5])]
            assert stopped.finish_reason is FinishReason.STOP
            drawn = [
                await tokens_of(link.generate(ask(PROMPTS[0], None, temperature=1.0, seed=seed)))
                for seed in (3, 3, 4)
            ]
            assert drawn[0] == drawn[1] != drawn[2]
            with pytest.raises(ReplicaRefused, match="refused the adapter"):
                await link.load("ft:none", tmp_path / "nothing")
            with pytest.raises(ReplicaRefused, match="400"):
                await tokens_of(link.generate(ask((1 << 30,), None)))
            with pytest.raises(ReplicaRefused, match="404"):
                await tokens_of(link.generate(ask(PROMPTS[0], adapters[0].name)))
            await link.load(adapters[0].name, adapters[0].path)
            await link.load(adapters[0].name, adapters[0].path)
            assert await tokens_of(link.generate(ask(PROMPTS[0], adapters[0].name))) != plain
            await link.unload(adapters[0].name)
            await link.unload(adapters[0].name)
            async with link.generate(ask(PROMPTS[0], None, max_tokens=400)) as generation:
                assert await anext(generation) == plain[:1]
                assert (await link.stats())["running"] == 1
            await until_idle(opened.link)
        finally:
            await link.aclose()
            opened.worker.kill()
        await until_async(lambda: not is_alive(opened.worker.pid))
        text = log.read_text()
        assert "prompt_token_ids" not in text
        assert str(list(PROMPTS[1])) not in text

    asyncio.run(run())


async def until_idle(link: ReplicaLink) -> None:
    """Wait until the server notices that its caller disconnected."""
    async with asyncio.timeout(30):
        while (await link.stats())["running"]:  # noqa: ASYNC110 - the server is another process
            await asyncio.sleep(0.1)
