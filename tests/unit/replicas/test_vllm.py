"""Replicas that are vLLM servers, against a process that obeys the same options and the same protocol.

`TUNESHIP_TEST_VLLM` (a command, e.g. `/opt/vllm/bin/vllm serve`) runs `test_real_vllm.py` against a real one.
"""

import asyncio
import errno
import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.agents import AUTHORITY
from tests.support.fakes.openai_server import Trouble
from tests.support.models.tiny_model import build_tiny_model
from tests.support.waiting import is_alive, until, until_async
from tuneship.agents.agent import NodeReplica
from tuneship.agents.agent_protocol import ServeOrder
from tuneship.agents.agent_starter import AgentOptions, AgentStarter, BaseOptions
from tuneship.agents.base_digest import BaseDigests
from tuneship.agents.local_agents import LocalAgents
from tuneship.host.gpus import GpuLeases
from tuneship.processes.worker_processes import LocalProcesses, WorkerProcess
from tuneship.processes.worker_protocol import Worker, WorkerSpec
from tuneship.replicas.engine_kinds import VllmServer
from tuneship.replicas.local_replicas import LocalReplicas
from tuneship.replicas.replica import Replica
from tuneship.replicas.replica_group import HUNG_PROBES
from tuneship.replicas.replica_link import Adapter
from tuneship.replicas.vllm import vllm_starter
from tuneship.security.sealed_files import new_key, write_sealed
from tuneship.serving.replica_client import (
    FinishReason,
    GenerateRequest,
    ReplicaLost,
    ReplicaRefused,
    ServingError,
    TokenScore,
    TokenStream,
    UnusableGrammar,
)

pytestmark = pytest.mark.slow
SERVER = Path(__file__).parents[2] / "support" / "fakes" / "openai_server.py"
PATIENCE_S = 600.0
GARBAGE = (
    Trouble.NO_JSON,
    Trouble.NO_TOKEN_IDS,
    Trouble.TEXT_FOR_TOKENS,
    Trouble.TOO_MANY,
    Trouble.CUT,
    Trouble.BAD_REASON,
    Trouble.ERROR_EVENT,
    Trouble.ENDLESS_LINE,
    Trouble.NO_CHOICES,
    Trouble.UNDONE,
)


class PlayedServers:
    """Played vLLM servers that share a folder of adapters, and their notes on what they saw."""

    def __init__(self, folder: Path, *, on_agents: bool = False) -> None:
        """`on_agents`: an agent runs each server, and is asked instead of it."""
        self._on_agents = on_agents
        self.folder = folder
        self.seen = folder / "seen.jsonl"
        self.log = folder / "log"

    def server(self, *more: str, patience_s: float = PATIENCE_S) -> VllmServer:
        command = (sys.executable, str(SERVER))
        return VllmServer(command, ("--seen", str(self.seen), *more), patience_s)

    def starter(self, *more: str, patience_s: float = PATIENCE_S) -> Any:
        server = self.server(*more, patience_s=patience_s)
        runtime = LocalProcesses(isolated=True)
        if not self._on_agents:
            return vllm_starter(runtime, server)
        options = AgentOptions(True, 0, 1, lambda _: BaseOptions(vllm=server), 60)
        agents = LocalAgents(LocalProcesses(isolated=False), self.log)
        of_agents = AgentStarter(agents, AUTHORITY, "t", options, lambda: datetime.now(UTC))
        return of_agents.start_replica

    async def open(self, *more: str, patience_s: float = PATIENCE_S) -> Replica:
        return await self.starter(*more, patience_s=patience_s)(self.folder, self.log)

    def group(self, *more: str) -> LocalReplicas:
        return LocalReplicas(self.starter(*more), self.folder, self.log)

    def adapter(self, name: str, rank: int) -> Adapter:
        path = self.folder / name.replace(":", "_")
        path.mkdir()
        (path / "adapter_config.json").write_text(json.dumps({"r": rank}))
        return Adapter(name, path)

    def notes(self, kind: str) -> list[Any]:
        """Return the notes of one kind so far. A last line that is still being written is left out."""
        text = self.seen.read_text() if self.seen.exists() else ""
        lines = [one for one in text.splitlines(keepends=True) if one.endswith("\n")]
        return [one[kind] for one in map(json.loads, lines) if kind in one]

    def folders(self) -> list[Path]:
        """Return the folders of the servers' sockets that still exist."""
        return [one for one in map(Path, self.notes("folder")) if one.exists()]

    def processes(self) -> list[int]:
        """Return the ids of the servers and of the processes that they started."""
        return [*self.notes("pid"), *self.notes("child")]


ON_AGENTS = "processes of agents"
EVERYWHERE = pytest.mark.parametrize(
    "servers", ["processes of the service", ON_AGENTS], indirect=True
)


@pytest.fixture
def servers(tmp_path: Path, request: pytest.FixtureRequest) -> PlayedServers:
    on_agents = getattr(request, "param", "") == ON_AGENTS
    if on_agents:
        build_tiny_model(tmp_path)  # agents compare its digest
    return PlayedServers(tmp_path, on_agents=on_agents)


@EVERYWHERE
def test_a_sealed_adapter_is_plain_only_in_the_servers_private_folder(
    servers: PlayedServers,
) -> None:
    key = new_key()
    sealed = servers.folder / "sealed"
    sealed.mkdir()
    write_sealed(sealed / "adapter_config.json", key, b'{"r": 3}')

    async def run() -> None:
        opened = await servers.open()
        await opened.link.load("ft:a:sealed", sealed, key)
        assert await tokens_of(opened.link.generate(ask(10, adapter="ft:a:sealed")))
        (folder,) = servers.folders()
        (plain,) = folder.rglob("adapter_config.json")
        assert plain.read_bytes() == b'{"r": 3}'
        assert permissions(folder) == 0o700
        await opened.link.unload("ft:a:sealed")
        assert not plain.exists()
        with pytest.raises(ReplicaRefused, match="damaged"):
            await opened.link.load("ft:a:sealed", sealed, new_key())
        assert not plain.parent.exists()
        write_sealed(sealed / "adapter_config.json", key, b'{"r": 300}')
        with pytest.raises(ReplicaRefused, match="refused the adapter"):
            await opened.link.load("ft:a:sealed", sealed, key)
        assert not plain.parent.exists()
        write_sealed(sealed / "adapter_config.json", key, b'{"r": 3}')
        await opened.link.load("ft:a:sealed", sealed, key)
        await opened.link.aclose()
        # An agent that needs more than its two seconds is killed, and its server removes the folder after that.
        await until_async(lambda: not folder.exists())
        await asyncio.to_thread(opened.worker.kill)

    asyncio.run(run())


def plain(scores: list[TokenScore]) -> list[TokenScore]:
    """The scores with pairs, which are lists after they came over a connection."""
    return [
        one._replace(top=[(int(token), logprob) for token, logprob in one.top]) for one in scores
    ]


def ask(last: int, max_tokens: int = 3, **more: Any) -> GenerateRequest:
    return GenerateRequest(tokens=(5, last), max_tokens=max_tokens, **more)


async def tokens_of(generation: TokenStream) -> list[int]:
    async with generation:
        return [token async for chunk in generation for token in chunk]


@EVERYWHERE
@pytest.mark.parametrize("most", [0, 3])
def test_it_tells_log_probabilities_of_new_tokens_and_of_the_prompt(
    servers: PlayedServers, most: int
) -> None:
    async def run() -> None:
        opened = await servers.open()
        request = replace(ask(10, most), tokens=(5, 7, 10), logprobs=1, prompt_logprobs=2)
        scored = opened.link.generate(request)
        new = [11, 12, 13][:most]
        assert await tokens_of(scored) == new
        assert scored.finish_reason is FinishReason.LENGTH
        assert plain(scored.prompt_scores) == [
            TokenScore(token, -token / 10, [(1, -0.1), (2, -0.2)]) for token in (7, 10)
        ]
        assert plain(scored.scores) == [
            TokenScore(token, -token / 10, [(1, -0.1)]) for token in new
        ]
        (asked,) = servers.notes("asked")
        assert (asked["logprobs"], asked["echo"]) == (2, True)
        stopped = opened.link.generate(ask(10, 9, stop_tokens=(12,), logprobs=0))
        assert await tokens_of(stopped) == [11]
        assert plain(stopped.scores) == [TokenScore(11, -1.1, []), TokenScore(12, -1.2, [])]
        await opened.link.aclose()
        opened.worker.kill()

    asyncio.run(run())


@EVERYWHERE
def test_it_refuses_a_grammar_by_its_name(servers: PlayedServers) -> None:
    async def run() -> None:
        opened = await servers.open()
        with pytest.raises(UnusableGrammar, match="engine"):
            await tokens_of(opened.link.generate(ask(10, grammar="{}")))
        assert servers.notes("asked") == []
        await opened.link.aclose()
        opened.worker.kill()

    asyncio.run(run())


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@EVERYWHERE
def test_it_continues_token_ids_and_says_why_it_ended(servers: PlayedServers) -> None:
    async def run() -> None:
        opened = await servers.open()
        generation = opened.link.generate(ask(10, temperature=0.5, top_p=0.9, seed=7))
        assert await tokens_of(generation) == [11, 12, 13]
        assert generation.finish_reason is FinishReason.LENGTH
        stopped = opened.link.generate(ask(10, max_tokens=9, stop_tokens=(13, 99), queue="dep"))
        assert await tokens_of(stopped) == [11, 12]
        assert stopped.finish_reason is FinishReason.STOP
        await until_async(lambda: opened.link.in_flight == 0)
        first, second = servers.notes("asked")
        assert first == {
            "model": "base",
            "prompt": [5, 10],
            "max_tokens": 3,
            "temperature": 0.5,
            "top_p": 0.9,
            "seed": 7,
            "stop_token_ids": [],
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        assert second["stop_token_ids"] == [13, 99]
        assert second["cache_salt"] == "dep"
        await tokens_of(opened.link.generate(ask(10, temperature=1e-38)))
        assert servers.notes("asked")[-1]["temperature"] == 0.0
        await opened.link.aclose()
        opened.worker.kill()

    asyncio.run(run())


@EVERYWHERE
def test_tokens_come_before_the_last_one_is_made(servers: PlayedServers) -> None:
    async def run() -> None:
        opened = await servers.open()
        async with opened.link.generate(ask(Trouble.SILENT)) as generation:
            assert await anext(generation) == [1]
        await until_async(lambda: servers.notes("ended") == ["hung up"])
        await until_async(lambda: opened.link.in_flight == 0)
        await opened.link.aclose()
        opened.worker.kill()

    asyncio.run(run())


def test_adapters_are_loaded_while_it_runs_and_mixed(servers: PlayedServers) -> None:
    async def run() -> None:
        group = servers.group()
        two, three = servers.adapter("ft:a:two", 2), servers.adapter("ft:a:three", 3)
        await group.ready(two)
        await group.ready(three)
        asked = [None, two, three, two]
        generations = [
            await group.generate(one, ask(10, adapter=one and one.name)) for one in asked
        ]
        found = await asyncio.gather(*map(tokens_of, generations))
        assert found == [[11, 12, 13], [12, 14, 16], [13, 16, 19], [12, 14, 16]]
        await group.unload(two.name)
        (replica,) = group.live
        with pytest.raises(ReplicaRefused, match="404"):
            await tokens_of(replica.link.generate(ask(10, adapter=two.name)))
        # The server has already lost this adapter, and unloading it is no error.
        await replica.link.unload(two.name)
        await group.close()

    asyncio.run(run())


@EVERYWHERE
def test_a_refused_adapter_leaves_the_others_served(servers: PlayedServers) -> None:
    async def run() -> None:
        group = servers.group("--max-lora-rank", "8")
        await group.ready(servers.adapter("ft:a:good", 2))
        broken = Adapter("ft:a:broken", servers.folder / "nothing")
        refusals = {
            servers.adapter("ft:a:large", 16): "refused the adapter",
            broken: "adapter files cannot be (opened|read): (No such file or directory|FileNotFoundError)$",
        }
        for one, text in refusals.items():
            with pytest.raises(ReplicaRefused, match=text):
                await group.ready(one)
        assert group.answering("ft:a:good") == 1
        assert group.answering("ft:a:large") == 0
        assert await tokens_of(await group.generate(None, ask(10))) == [11, 12, 13]
        await group.close()

    asyncio.run(run())


@EVERYWHERE
def test_garbage_is_a_lost_generation_and_the_next_one_is_answered(servers: PlayedServers) -> None:
    async def run() -> None:
        opened = await servers.open()
        for trouble in GARBAGE:
            with pytest.raises(ReplicaLost, match=r"protocol|connection|with an error \(500\)"):
                await tokens_of(opened.link.generate(ask(trouble)))
        with pytest.raises(ReplicaLost, match="500"):
            await tokens_of(opened.link.generate(ask(Trouble.FAILED)))
        for trouble in (Trouble.REFUSED, Trouble.REFUSED_LATE):
            with pytest.raises(ReplicaRefused, match="400"):
                await tokens_of(opened.link.generate(ask(trouble)))
        assert await tokens_of(opened.link.generate(ask(10))) == [11, 12, 13]
        await opened.link.aclose()
        opened.worker.kill()

    asyncio.run(run())


@EVERYWHERE
def test_a_server_that_dies_is_replaced_with_its_adapters(servers: PlayedServers) -> None:
    async def run() -> None:
        group = servers.group()
        two = servers.adapter("ft:a:two", 2)
        await group.ready(two)
        (first,) = group.pids
        with pytest.raises(ReplicaLost):
            await tokens_of(await group.generate(None, ask(Trouble.DIES)))
        await until_async(lambda: first not in group.pids)
        request = ask(10, adapter=two.name)
        assert await tokens_of(await group.generate(two, request)) == [12, 14, 16]
        assert first not in group.pids
        kinds = [one.message.partition(":")[0] for one in group.take_events()]
        assert kinds == ["replica started", "replica lost", "replica started"]
        gone, _ = servers.notes("child")
        await until_async(lambda: not is_alive(gone))
        await group.close()
        # An agent that takes long to end is killed, and its server removes the folder just after.
        await until_async(lambda: not servers.folders())

    asyncio.run(run())


def test_an_agent_that_is_killed_while_it_ends_leaves_no_decrypted_adapter(
    servers: PlayedServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed server removes nothing, so the agent must have removed the files before it kills the server."""
    build_tiny_model(servers.folder)
    digest = BaseDigests().of(servers.folder)
    base, server = str(servers.folder), servers.server()
    order = ServeOrder(
        base, digest, isolated=False, cache_bytes=0, processes=1, weights=None, vllm=server
    )
    left: list[list[Path]] = []
    kill = WorkerProcess.kill

    def kill_and_note(worker: WorkerProcess) -> None:
        left.append(servers.folders())
        kill(worker)

    async def run() -> None:
        replica = NodeReplica(servers.folder, servers.folder)
        reader, writer = await replica.start(order)
        assert "ready" in json.loads(await reader.readline())
        assert len(servers.folders()) == 1
        monkeypatch.setattr(WorkerProcess, "kill", kill_and_note)
        await replica.close()
        writer.close()

    asyncio.run(run())
    assert left == [[]]


def test_a_service_that_ends_right_after_a_server_was_killed_leaves_no_folder(
    servers: PlayedServers,
) -> None:
    async def run() -> None:
        group = servers.group()
        await group.ready(None)
        (folder,), (first,) = servers.folders(), group.pids
        # The server is killed before it can remove its folder.
        os.killpg(first, signal.SIGKILL)
        # This blocks the event loop, so nothing else in this process notices the end meanwhile.
        until(lambda: first not in group.pids)
        assert folder.exists()
        group.resize(0, {})
        await group.close()
        assert not folder.exists()

    asyncio.run(run())


@EVERYWHERE
def test_one_that_is_not_healthy_is_ended_after_some_probes(servers: PlayedServers) -> None:
    async def run() -> None:
        group = servers.group()
        await group.ready(None)
        (first,) = group.pids
        await group.probe(PATIENCE_S)
        assert group.answering(None) == 1
        assert group.waiting == 3
        (servers.folder / "sick").touch()
        await group.probe(PATIENCE_S)
        assert group.answering(None) == 0
        for _ in range(HUNG_PROBES):
            await group.probe(PATIENCE_S)
        await until_async(lambda: first not in group.pids)
        (servers.folder / "sick").unlink()
        group.resize(1, {})
        await until_async(lambda: group.answering(None) == 1)
        await group.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("more", "patience_s", "error", "why"),
    [
        (("--start-after", "600"), 1.0, ReplicaLost, "not ready within 1 s"),
        (("--die-at-start",), PATIENCE_S, ReplicaRefused, "ended while it started"),
        (("--no-such-option",), PATIENCE_S, ReplicaRefused, "ended while it started"),
    ],
)
def test_one_that_does_not_become_ready_leaves_nothing_behind(
    servers: PlayedServers,
    more: tuple[str, ...],
    patience_s: float,
    error: type[ServingError],
    why: str,
) -> None:
    with pytest.raises(error, match=why):
        asyncio.run(servers.open(*more, patience_s=patience_s))
    asyncio.run(until_async(lambda: not any(map(is_alive, servers.processes()))))
    asyncio.run(until_async(lambda: not servers.folders()))


def test_a_command_that_is_not_there_is_refused(servers: PlayedServers) -> None:
    start_replica = vllm_starter(
        LocalProcesses(isolated=True), VllmServer(("/nowhere/vllm", "serve"))
    )
    with pytest.raises(ReplicaRefused, match="ended while it started"):
        asyncio.run(start_replica(servers.folder, servers.log))
    assert "could not be started: No such file" in servers.log.read_text()


def test_only_its_owner_with_the_key_can_ask_it_and_nothing_is_logged(
    servers: PlayedServers,
) -> None:
    async def run() -> None:
        opened = await servers.open()
        await tokens_of(opened.link.generate(ask(4242)))
        (folder,), (arguments,) = servers.folders(), servers.notes("arguments")
        assert permissions(folder) == 0o700
        key = opened.link._client.headers["Authorization"].removeprefix("Bearer ")
        assert len(key) >= 32
        assert key not in " ".join(arguments)
        transport = httpx.AsyncHTTPTransport(uds=f"{folder}/socket")
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=PATIENCE_S
        ) as stranger:
            answer = await stranger.post("/v1/completions", json={"prompt": [1]})
        assert answer.status_code == 401
        await opened.link.aclose()
        opened.worker.kill()
        assert "4242" not in servers.log.read_text()
        # An agent that takes long to end is killed, and its server removes the folder just after.
        await until_async(lambda: not servers.folders())

    asyncio.run(run())


def test_it_ends_with_the_service_and_so_do_its_own_processes(servers: PlayedServers) -> None:
    program = (
        "import asyncio, sys, time\n"
        "from pathlib import Path\n"
        "from tests.unit.replicas.test_vllm import PlayedServers\n"
        "servers = PlayedServers(Path(sys.argv[1]))\n"
        "asyncio.run(servers.open())\n"
        "print('open', flush=True)\n"
        "time.sleep(600)\n"
    )
    service = subprocess.Popen(
        [sys.executable, "-c", program, str(servers.folder)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    with service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"open\n"
        assert len(servers.processes()) == 2
        assert all(map(is_alive, servers.processes()))
        service.send_signal(signal.SIGKILL)
    asyncio.run(until_async(lambda: not any(map(is_alive, servers.processes()))))
    asyncio.run(until_async(lambda: not servers.folders()))


def test_closing_fails_what_is_in_flight(servers: PlayedServers) -> None:
    async def run() -> None:
        opened = await servers.open()
        generation = opened.link.generate(ask(Trouble.SILENT))
        assert await anext(generation) == [1]
        await opened.link.aclose()
        with pytest.raises(ReplicaLost, match="closed"):
            await anext(generation)
        with pytest.raises(ReplicaLost):
            await tokens_of(opened.link.generate(ask(10)))
        with pytest.raises(ReplicaLost):
            await opened.link.stats()
        assert isinstance(await opened.link.wait_lost(), ReplicaLost)
        opened.worker.kill()

    asyncio.run(run())


class NoRuntime:
    """Starts nothing, and remembers what it was asked to start."""

    def __init__(self) -> None:
        self.specs: list[WorkerSpec] = []

    def start(self, spec: WorkerSpec) -> Worker:
        self.specs.append(spec)
        raise OSError(errno.ENOMEM, "no memory")

    def preload(self, module: str) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("command", "options", "seen"),
    [
        (("vllm", "serve"), (), "1,2,3,0"),
        (("vllm", "serve"), ("-tp", "2"), "1,2,3,0"),
        (("env", "CUDA_VISIBLE_DEVICES=2,3", "vllm", "serve"), ("-tp", "2"), "2,3,1,0"),
    ],
)
def test_a_server_sees_the_gpus_first_that_no_training_uses(
    tmp_path: Path, command: tuple[str, ...], options: tuple[str, ...], seen: str
) -> None:
    """The server takes the first ones, and may need more than its options say to us."""
    leases, runtime = GpuLeases(lambda: ("0", "1", "2", "3")), NoRuntime()
    start_replica = vllm_starter(runtime, VllmServer(command, options), leases)
    with leases.lease(1), pytest.raises(OSError, match="no memory"):
        asyncio.run(start_replica(tmp_path, tmp_path / "log"))
    assert runtime.specs[0].environment["CUDA_VISIBLE_DEVICES"] == seen
    with leases.lease(4) as whole:
        assert not whole.is_shared, "a server that did not start holds none"


def test_a_server_takes_as_many_gpus_as_its_options_say() -> None:
    for options, count in {
        (): 1,
        ("--tensor-parallel-size", "4"): 4,
        ("-tp=2", "--pipeline_parallel_size", "2", "-dp", "3"): 12,
        ("-tp", "auto"): 1,
    }.items():
        assert VllmServer(("vllm", "serve"), options).gpus == count


def test_a_server_holds_its_gpu_as_long_as_it_runs(servers: PlayedServers) -> None:
    leases = GpuLeases(lambda: ("0", "1"))

    async def run() -> None:
        runtime = LocalProcesses(isolated=True)
        opened = await vllm_starter(runtime, servers.server(), leases)(servers.folder, servers.log)
        with leases.lease(1) as training:
            assert training.gpus == ("1",)
        opened.worker.kill()
        await opened.link.aclose()
        with leases.lease(1) as training:
            assert training.gpus == ("0",)

    asyncio.run(run())
