"""The agent of a training, with a played process, and its leader over real TLS: leases, files, and what is refused."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.agents import HELLO, HURRIED, access, silent_after
from tests.support.cluster.training_nodes import TrainingNode, order_for
from tests.support.models.tiny_model import build_tiny_model
from tests.support.service.engines import PlayedEngines
from tests.support.waiting import PATIENCE_S, until_async
from tuneship.agents import agent_training
from tuneship.agents.agent_protocol import (
    PIECE_BYTES,
    AgentAddress,
    CannotServe,
)
from tuneship.agents.agent_sockets import encoded
from tuneship.agents.agent_training import AgentLease, AgentTraining
from tuneship.agents.agent_training_link import (
    AgentTrainingLink,
    TrainingAgentLost,
    TrainingRefused,
)
from tuneship.agents.training_protocol import (
    ADAPTER,
    ASK_EVERY_S,
    CHECKPOINT,
    LEASE_S,
)
from tuneship.host.deadline_file import elapsed_s, is_past, write_deadline
from tuneship.host.thread_pools import Threads
from tuneship.training.checkpoint_folders import step_folder
from tuneship.training.spec import (
    CANCEL_FILE,
    FORMAT_FILE,
    LEASE_FILE,
)

BIG = bytes(range(256)) * (PIECE_BYTES // 256) + b"end"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


class Led:
    """An agent that listens, and what its leader decides."""

    def __init__(self, agent: AgentTraining, address: AgentAddress, engines: PlayedEngines) -> None:
        self.agent, self.address, self.engines = agent, address, engines
        self.may_go_on = True
        self.asked: list[int] = []

    async def connect(self, renew: Callable[[int], Awaitable[bool]] | None = None) -> Any:
        return await AgentTrainingLink.open(
            self.address, access(), Threads("test", 2), renew or self._renew
        )

    async def _renew(self, number: int) -> bool:
        self.asked.append(number)
        return self.may_go_on

    async def trainer(self) -> Any:
        """Wait until the process was started."""
        await until_async(lambda: self.engines.trainers)
        return self.engines.trainers[0]


@asynccontextmanager
async def node_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, check: Callable[[Path], None] = lambda _: None
) -> AsyncIterator[Led]:
    engines = PlayedEngines([])
    monkeypatch.setattr(agent_training, "LocalProcesses", lambda **_: engines)
    node = TrainingNode(folder, check)
    address = await node.listen()
    try:
        yield Led(node.agent, address, engines)
    finally:
        await node.close()


def test_a_lease_counts_from_the_moment_at_which_it_was_asked_for() -> None:
    now = 100.0
    lease = AgentLease(lambda: now)
    assert lease.ask() == 0
    assert lease.ask() is None
    assert lease.until is None
    assert not lease.is_over
    now += 20.0  # the answer is late
    lease.renew(0)
    assert lease.until == 100.0 + LEASE_S
    assert lease.ask() == 1
    now += LEASE_S - 20.0 + 0.1
    assert lease.is_over
    lease.renew(1)
    assert not lease.is_over
    now += ASK_EVERY_S + LEASE_S
    assert lease.ask() == 2
    for number in (0, 1, 7):  # answers that come too late, and one to nothing
        lease.renew(number)
    assert lease.is_over


def test_a_deadline_that_is_written_is_obeyed(tmp_path: Path) -> None:
    file = tmp_path / "deadline"
    assert not is_past(file)
    write_deadline(file, elapsed_s() + 3600)
    assert not is_past(file)
    write_deadline(file, elapsed_s() - 1)
    assert is_past(file)


def test_it_trains_and_hands_out_what_the_process_writes(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, copies = tmp_path / "data.jsonl", tmp_path / "copies"
    data.write_bytes(BIG)
    copies.mkdir()

    async def run() -> None:
        async with node_in(tmp_path / "node", monkeypatch) as node:
            link = await node.connect()
            await link.send_file(data, "inputs/training/data.jsonl")
            await link.send_file(data, f"checkpoints/{FORMAT_FILE}")
            await link.train(order_for(base))
            trainer = await node.trainer()
            spec = json.loads((trainer.folder / "spec.json").read_text())
            assert spec["training_file"] == str(
                tmp_path / "node" / "inputs" / "training" / data.name
            )
            assert (tmp_path / "node" / "inputs" / "training" / data.name).read_bytes() == BIG
            assert spec["base_model"] == str(base)
            assert trainer.order.keys.training == "key of the data"
            assert not is_past(trainer.folder / LEASE_FILE)

            trainer.start_of(4)
            trainer.step(1)
            news = await link.news(0, 0, 60)
            assert [json.loads(line)["kind"] for line in news.lines.splitlines()] == [
                "started",
                "step",
            ]
            place = step_folder(tmp_path / "node" / "checkpoints", 1)
            place.mkdir()
            (place / "state.json").write_bytes(b"state")
            news = await link.news(len(news.lines), 0, 60)
            assert (news.lines, news.step, news.exit_code) == ("", 1, None)
            step, files = await link.hold(CHECKPOINT)
            (place / "state.json").unlink()  # it stays, as it is held
            await link.fetch(CHECKPOINT, files, copies)
            assert step == 1
            assert (copies / "state.json").read_bytes() == b"state"
            assert (copies / FORMAT_FILE).read_bytes() == BIG

            trainer.complete()
            _, files = await link.hold(ADAPTER)
            await link.fetch(ADAPTER, files, copies)
            assert (copies / "adapter_config.json").exists()
            await link.cancel()
            await until_async((trainer.folder / CANCEL_FILE).exists)
            await link.stop()
            assert node.agent.over.is_set()
            await link.aclose()

    asyncio.run(run())


def test_nothing_starts_before_the_lease_is_renewed_and_all_ends_with_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with node_in(tmp_path / "node", monkeypatch) as node:
            now = 0.0
            node.agent._lease = AgentLease(lambda: now)
            node.may_go_on = False
            link = await node.connect()
            (tmp_path / "data.jsonl").write_text("{}\n")
            await link.send_file(tmp_path / "data.jsonl", "inputs/training/data.jsonl")
            await link.train(order_for(base))
            await until_async(lambda: node.asked == [0])
            assert node.engines.trainers == []
            now += ASK_EVERY_S
            node.may_go_on = True
            node.agent.send_heartbeat()
            trainer = await node.trainer()
            now += LEASE_S + 0.1
            assert trainer.code is None
            node.agent.send_heartbeat()
            assert trainer.code == -signal.SIGKILL
            assert node.agent.over.is_set()
            await link.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("change", ["none", "dead", "another base"])
def test_a_process_that_waits_gets_the_order_with_the_lease_and_another_one_if_it_cannot_use_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    async def run() -> None:
        async with node_in(tmp_path / "node", monkeypatch) as node:
            node.may_go_on = False
            link = await node.connect()
            await link.warm(tmp_path if change == "another base" else base, isolated=False)
            waiting = await node.trainer()
            await link.warm(base, isolated=False)  # there is one
            (tmp_path / "data.jsonl").write_text("{}\n")
            await link.send_file(tmp_path / "data.jsonl", "inputs/training/data.jsonl")
            await link.train(order_for(base))
            await until_async(lambda: node.asked == [0])
            assert node.engines.trainers == [waiting]
            if change == "dead":
                waiting.code = 1
            node.agent._renew(0)
            used = node.engines.trainers[-1]
            assert (used is waiting) == (change == "none")
            assert used.order.keys.training == "key of the data"
            await link.stop()
            assert all(one.code is not None for one in node.engines.trainers)
            await link.aclose()

    asyncio.run(run())


def test_a_leader_that_comes_back_reads_on(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with node_in(tmp_path / "node", monkeypatch) as node:
            first = await node.connect()
            (tmp_path / "data.jsonl").write_text("{}\n")
            await first.send_file(tmp_path / "data.jsonl", "inputs/training/data.jsonl")
            await first.train(order_for(base))
            trainer = await node.trainer()
            trainer.start_of(4)
            known = len((await first.news(0, 0, 60)).lines)
            second = await node.connect()
            with pytest.raises(TrainingAgentLost):
                await first.news(known, 0, 60)
            trainer.code = 3
            assert (await second.news(known, 0, 60)).exit_code == 3
            for link in (first, second):
                await link.aclose()

    asyncio.run(run())


def test_a_request_of_a_lost_connection_is_not_answered_over_the_next(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both number their questions from 0, so the leader would take lines that it has for those behind them."""

    async def run() -> None:
        async with node_in(tmp_path / "node", monkeypatch) as node:
            link = await node.connect()
            await link.train(order_for(base))
            trainer = await node.trainer()
            asking = asyncio.create_task(link.news(0, 0, PATIENCE_S))
            await until_async(lambda: node.agent._tasks)
            await link.aclose()
            with pytest.raises(TrainingAgentLost):
                await asking
            link = await node.connect()
            never = asyncio.get_running_loop().create_future()
            link._answers[0] = never  # the id of the question that was lost
            trainer.say({"kind": "log"})
            await until_async(lambda: not node.agent._tasks)
            link._ids = count(1)
            assert (await link.news(0, 0, PATIENCE_S)).lines == '{"kind": "log"}\n'
            assert not never.done()
            await link.aclose()

    asyncio.run(run())


def test_a_node_that_dies_before_it_is_ready_is_given_up(base: Path) -> None:
    async def renew(_: int) -> bool:
        raise AssertionError("it asks for no lease")

    async def run() -> None:
        hurried = access(timing=HURRIED)
        async with silent_after(HELLO) as address:
            link = await AgentTrainingLink.open(address, hurried, Threads("test", 1), renew)
            with pytest.raises(TrainingAgentLost):
                await link.train(order_for(base))
            await link.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["digest", "missing", "isolation", "disk"])
def test_a_training_that_a_node_cannot_do_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    order, named = order_for(base), "is another one"
    if fault == "digest":
        order = replace(order, digest="0" * 64)
    elif fault == "missing":
        order, named = replace(order, base=str(tmp_path / "none")), "cannot read the base model"
    elif fault == "isolation":
        order, named = replace(order, isolated=True), "cannot isolate"

    def check(_: Path) -> None:
        raise CannotServe("the node cannot isolate a worker")

    async def run() -> None:
        async with node_in(tmp_path / "node", monkeypatch, check) as node:
            link = await node.connect()
            (tmp_path / "data.jsonl").write_text("{}\n")
            if fault == "disk":  # a file is where a folder is to be
                (tmp_path / "node").mkdir(exist_ok=True)
                (tmp_path / "node" / "inputs").write_text("")
            await link.send_file(tmp_path / "data.jsonl", "inputs/training/data.jsonl")
            text = "cannot keep the files" if fault == "disk" else named
            with pytest.raises(TrainingRefused, match=text):
                await link.train(order)
            assert node.engines.trainers == []
            await link.aclose()

    asyncio.run(run())


@pytest.mark.parametrize(
    "frames",
    [
        [{"op": "hello", "role": "gateway", "epoch": 1, "protocol": 1}],
        [{"op": "hello", "role": "leader", "epoch": 1, "protocol": 99}],
        [{"op": "train"}],
        [{"op": "hello", "role": "leader", "epoch": 1, "protocol": 1}, {"op": "dance"}],
        *(
            [
                {"op": "hello", "role": "leader", "epoch": 1, "protocol": 1},
                {"op": "file", "path": path, "content": ""},
            ]
            for path in ("spec.json", "inputs/../x", "inputs//x", "/etc/x", "attempt/spec.json")
        ),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: list[dict[str, Any]]
) -> None:
    async def run() -> None:
        async with node_in(tmp_path / "node", monkeypatch) as node:
            reader, writer = await asyncio.open_connection(
                node.address.host, node.address.port, ssl=access().context
            )
            for frame in frames:
                writer.write(encoded(frame))
            while await reader.readline():
                continue
            writer.transport.abort()
            assert not (tmp_path / "node").exists()

    asyncio.run(run())
