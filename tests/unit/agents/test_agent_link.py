"""Services ask one replica through its agent over TLS: each gets its own answers, and one of them leads."""

import asyncio
import errno
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.agents import (
    HELLO,
    HURRIED,
    ORDER,
    PlayedAgent,
    access,
    played_agent,
    silent_after,
)
from tests.support.service.engines import PlayedEngines
from tests.support.waiting import until_async
from tuneship.agents import agent_relay
from tuneship.agents.agent_link import AgentTiming, open_agent
from tuneship.agents.agent_protocol import PIECE_BYTES, PROTOCOL, AgentAddress
from tuneship.agents.agent_sockets import encoded
from tuneship.serving.replica_client import (
    EmbedRequest,
    FinishReason,
    GenerateRequest,
    ReplicaLost,
    ReplicaRefused,
)

REQUEST = GenerateRequest(tokens=(7,), max_tokens=2, adapter=None)
TEXTS = EmbedRequest(texts=((1,), (2,)), adapter=None, dimensions=None)
LEAD = {"op": "hello", "role": "leader", "epoch": 1, "protocol": PROTOCOL}


def playing(
    engines: PlayedEngines, folder: Path, act: Callable[[PlayedAgent], Awaitable[None]]
) -> None:
    async def run() -> None:
        async with played_agent(engines, folder) as agent:
            await act(agent)

    asyncio.run(run())


async def running(engines: PlayedEngines, number: int) -> None:
    await until_async(lambda: len(engines.replicas[0].running) == number)


def test_answers_pass_through_the_agent(engines: PlayedEngines, tmp_path: Path) -> None:
    async def act(agent: PlayedAgent) -> None:
        link = await agent.lead()
        generation = link.generate(replace(REQUEST, logprobs=1))
        assert await generation.read_all() == [5, 6]
        assert generation.finish_reason is FinishReason.STOP
        assert len(generation.scores) == 2
        assert len(await link.embed(TEXTS)) == 2
        assert (await link.stats())["rows"] == 32
        assert link.facts.context_length == 512
        engines.error = {"error": "too long", "too_large": True}
        with pytest.raises(ReplicaRefused, match="too long"):
            await link.generate(REQUEST).read_all()
        assert link.in_flight == 0
        await link.aclose()
        assert agent.relay.over.is_set()
        assert agent.ended == ["epoch 1"]

    playing(engines, tmp_path, act)


def test_each_service_gets_its_own_answers(engines: PlayedEngines, tmp_path: Path) -> None:
    """The played replica answers each prompt with its own first token."""
    engines.answers_with_prompt = True

    async def act(agent: PlayedAgent) -> None:
        links = [await agent.lead(), await agent.attach(), await agent.attach()]
        asked = [
            (number, number * 100 + turn + 1, link)
            for turn in range(20)
            for number, link in enumerate(links)
        ]
        answers = await asyncio.gather(
            *(
                link.generate(replace(REQUEST, tokens=(token,))).read_all()
                for _, token, link in asked
            )
        )
        assert [answer[0] for answer in answers] == [token for _, token, _ in asked]
        vectors = await asyncio.gather(*(link.embed(TEXTS) for link in links))
        assert all(len(one) == 2 for one in vectors)
        assert [set(await link.stats()) for link in links] == [{"rows", "waiting"}] * 3

    playing(engines, tmp_path, act)


def test_requests_of_a_service_are_cancelled_when_it_disconnects(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    async def act(agent: PlayedAgent) -> None:
        leader, other = await agent.lead(), await agent.attach()
        engines.may_answer.clear()
        kept, left = leader.generate(REQUEST), other.generate(REQUEST)
        await running(engines, 2)
        await other.aclose()
        await running(engines, 1)
        engines.may_answer.set()
        assert await kept.read_all() == [5, 6]
        with pytest.raises(ReplicaLost):
            await left.read_all()
        assert not agent.relay.over.is_set()

    playing(engines, tmp_path, act)


def test_the_agent_obeys_the_latest_leader_alone(engines: PlayedEngines, tmp_path: Path) -> None:
    async def act(agent: PlayedAgent) -> None:
        earlier = await agent.lead(1, timing=AgentTiming(stop_patience_s=0.01))
        later = await agent.lead(2)
        with pytest.raises(ReplicaRefused, match="later leader"):
            await earlier.unload("a")
        await later.unload("a")
        with pytest.raises(ReplicaRefused, match="later leader"):
            await agent.lead(1)
        assert await earlier.generate(REQUEST).read_all() == [5, 6]
        await earlier.aclose()  # it asks the agent to stop, in vain
        assert await later.generate(REQUEST).read_all() == [5, 6]
        assert not agent.relay.over.is_set()

    playing(engines, tmp_path, act)


@pytest.mark.parametrize("operation", ["serve", "stop", "unload"])
def test_a_service_that_does_not_lead_changes_nothing(
    engines: PlayedEngines, tmp_path: Path, operation: str
) -> None:
    async def act(agent: PlayedAgent) -> None:
        await agent.lead()
        link = await agent.attach()
        with pytest.raises(ReplicaRefused, match="later leader"):
            await link._call(operation)
        assert not agent.relay.over.is_set()

    playing(engines, tmp_path, act)


def test_the_files_of_an_adapter_arrive_as_they_are_and_are_removed(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    files = {
        "adapter_model.safetensors": bytes(range(256)) * (PIECE_BYTES // 100),
        "exact": b"x" * PIECE_BYTES,
        "empty": b"",
    }
    for name, content in files.items():
        (adapter / name).write_bytes(content)
    seen = dict[str, bytes]()

    def look(frame: dict[str, Any]) -> None:
        seen.update({one.name: one.read_bytes() for one in Path(frame["path"]).iterdir()})
        seen["key"] = frame["key"].encode()

    engines.at_load = look

    async def act(agent: PlayedAgent) -> None:
        link = await agent.lead()
        await link.load("ft:m", adapter, "key")
        assert seen == {**files, "key": b"key"}
        assert list(agent.folder.rglob("adapter_model*")) == [adapter / "adapter_model.safetensors"]
        with pytest.raises(ReplicaRefused, match="cannot be read: FileNotFoundError"):
            await link.load("ft:n", tmp_path / "missing")
        assert await link.generate(REQUEST).read_all() == [5, 6]

    playing(engines, tmp_path, act)


def test_an_adapter_for_which_a_node_has_no_room_is_refused(
    engines: PlayedEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in ("a", "b", "c"):
        (adapter / name).write_bytes(b"x")
    opening = Path.open

    def full(path: Path, mode: str = "r", **more: Any) -> Any:
        if path.name == "b" and "a" in mode:
            raise OSError(errno.ENOSPC, "No space left on device")
        return opening(path, mode, **more)

    monkeypatch.setattr(Path, "open", full)
    found = list[bool]()
    engines.at_load = lambda frame: found.append(Path(frame["path"]).exists())

    async def act(agent: PlayedAgent) -> None:
        link = await agent.lead()
        await link.load("ft:m", adapter)
        assert found == [False]  # a real replica refuses a folder that is not there
        assert await link.generate(REQUEST).read_all() == [5, 6]

    playing(engines, tmp_path, act)


def test_requests_go_on_while_files_are_sent(engines: PlayedEngines, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "weights").write_bytes(bytes(40 * PIECE_BYTES))

    async def act(agent: PlayedAgent) -> None:
        link = await agent.lead()
        loading = asyncio.create_task(link.load("ft:m", adapter))
        assert await link.generate(REQUEST).read_all() == [5, 6]
        assert not loading.done()
        await loading

    playing(engines, tmp_path, act)


@pytest.mark.parametrize("name", ["../a", "/a", "a/b", "..", ""])
def test_a_file_lies_in_its_folder(engines: PlayedEngines, tmp_path: Path, name: str) -> None:
    async def act(agent: PlayedAgent) -> None:
        content = b64encode(b"x").decode()
        piece = {"op": "file", "transfer": "1:0", "name": name, "content": content}
        assert [one for one in await agent.speak(LEAD, piece) if "hello" not in one] == []

    playing(engines, tmp_path, act)
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == []


@pytest.mark.parametrize(
    "frames",
    [
        [{"op": "generate", "id": "1:0"}],
        [[]],
        [{**LEAD, "role": "king"}],
        [{**LEAD, "epoch": "one"}],
        [LEAD, {"op": "dance", "id": "1:0"}],
        [LEAD, {"op": "stats", "id": "2:0"}],
        [LEAD, {"op": "stats", "id": 5}],
        [LEAD, {"op": "load", "id": "1:0", "transfer": "2:1"}],
        [LEAD, {"op": "load", "id": "1:0", "transfer": "1:../../x"}],
        [LEAD, {"op": "file", "transfer": "1:0", "name": "a", "content": "?"}],
        [LEAD, {"op": "serve", "base": "x"}],
    ],
)
def test_a_service_that_breaks_the_protocol_is_disconnected(
    engines: PlayedEngines, tmp_path: Path, frames: list[Any]
) -> None:
    async def act(agent: PlayedAgent) -> None:
        answers = await agent.speak(*frames)
        assert [one for one in answers if "hello" not in one] == []
        await until_async(lambda: not agent.relay.is_connected)
        assert await (await agent.lead()).generate(REQUEST).read_all() == [5, 6]

    playing(engines, tmp_path, act)


def test_another_version_is_refused_by_name(engines: PlayedEngines, tmp_path: Path) -> None:
    async def act(agent: PlayedAgent) -> None:
        answers = await agent.speak({**LEAD, "protocol": PROTOCOL + 1})
        assert answers == [{"refused": f"the agent speaks version {PROTOCOL}"}]
        with pytest.raises(ReplicaRefused, match=r"tuneship 1\.2\.3, and the service 9\.9"):
            await open_agent(agent.address, access(version="9.9"), ORDER)

    playing(engines, tmp_path, act)


def test_an_agent_serves_one_replica(engines: PlayedEngines, tmp_path: Path) -> None:
    async def act(agent: PlayedAgent) -> None:
        await agent.lead()
        await agent.lead()
        with pytest.raises(ReplicaRefused, match="something else"):
            await agent.lead(order=replace(ORDER, base="other"))
        assert len(engines.replicas) == 1

    playing(engines, tmp_path, act)


def test_a_replica_that_refuses_is_reported(engines: PlayedEngines, tmp_path: Path) -> None:
    engines.fault = "no memory"

    async def act(agent: PlayedAgent) -> None:
        with pytest.raises(ReplicaRefused, match="no memory"):
            await agent.lead()
        assert agent.relay.over.is_set()

    playing(engines, tmp_path, act)


def test_an_agent_ends_with_its_replica(engines: PlayedEngines, tmp_path: Path) -> None:
    async def act(agent: PlayedAgent) -> None:
        link = await agent.lead()
        engines.may_answer.clear()
        generation = link.generate(REQUEST)
        await running(engines, 1)
        engines.replicas[0].kill()
        await agent.relay.over.wait()
        with pytest.raises(ReplicaLost):
            await generation.read_all()
        await link.wait_lost()

    playing(engines, tmp_path, act)


def test_another_program_at_its_address_is_not_spoken_to(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    async def act(agent: PlayedAgent) -> None:
        other = AgentAddress(agent.address.host, agent.address.port, "0" * 64)
        with pytest.raises(ReplicaRefused, match="another program"):
            await open_agent(other, access(), ORDER)

    playing(engines, tmp_path, act)


FACTS = {"pid": 1, "parameters": 1, "context_length": 1, "vocabulary": 1, "dtype": "f"}


@pytest.mark.parametrize(
    "said", [[], [HELLO], [HELLO, {"ready": FACTS}, {"heartbeat": {"others": 0}}]]
)
def test_an_agent_that_falls_silent_is_lost(said: list[dict[str, Any]]) -> None:
    async def run() -> None:
        is_ready = {"ready": FACTS} in said
        timing = HURRIED if is_ready else AgentTiming(silence_s=0.1)
        async with silent_after(*said) as address:
            opening = open_agent(address, access(timing=timing), ORDER)
            if is_ready:
                link = await opening
                generation = link.generate(REQUEST)
                assert "silent" in str(await link.wait_lost())
                assert link.is_lost
                opening = generation.read_all()
            with pytest.raises(ReplicaLost, match="silent"):
                await opening

    asyncio.run(run())


def test_a_heartbeat_keeps_a_quiet_agent(engines: PlayedEngines, tmp_path: Path) -> None:
    async def act(agent: PlayedAgent) -> None:
        link = await agent.lead(timing=HURRIED)
        # Not with `until_async`, which pauses longer on a busy machine: the link counts turns of this loop.
        for _ in range(20):
            agent.relay.send_heartbeat()
            await asyncio.sleep(HURRIED.heartbeat_s)
        assert not link.is_lost

    playing(engines, tmp_path, act)


def test_a_service_that_reads_nothing_is_disconnected(
    engines: PlayedEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_relay, "MAX_UNSENT_BYTES", 1 << 20)

    async def act(agent: PlayedAgent) -> None:
        link = await agent.lead()
        deaf = await agent.attach()
        deaf._writer.transport.pause_reading()
        (_, second) = agent.relay._connections.values()
        while agent.relay._connections.keys() >= {second.prefix}:
            second.send(b" " * (1 << 20) + b"\n")
            await asyncio.sleep(0)
        assert await link.generate(REQUEST).read_all() == [5, 6]
        deaf._writer.transport.abort()

    playing(engines, tmp_path, act)


def adapter_in(folder: Path) -> Path:
    adapter = folder / "adapter"
    adapter.mkdir()
    (adapter / "weights").write_bytes(b"x")
    return adapter


def test_an_adapter_is_loaded_once_whoever_asks_for_it(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    adapter, loads = adapter_in(tmp_path), list[str]()
    engines.at_load = lambda frame: loads.append(frame["adapter"])

    async def act(agent: PlayedAgent) -> None:
        links = [await agent.lead(), await agent.attach(), await agent.attach()]
        await asyncio.gather(*(link.load("ft:m", adapter) for link in links))
        await (await agent.attach()).load("ft:m", tmp_path / "never read")
        assert loads == ["ft:m"]
        request = replace(REQUEST, adapter="ft:m")
        assert [await link.generate(request).read_all() for link in links] == [[5, 6]] * 3
        assert [one for one in (agent.folder / "files").rglob("*") if one.is_file()] == []

    playing(engines, tmp_path, act)


def test_an_adapter_whose_sender_goes_is_loaded_from_the_next_one(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    """The first one's request is refused by the replica, as its files went with it."""
    adapter, loads = adapter_in(tmp_path), list[str]()

    async def act(agent: PlayedAgent) -> None:
        leader, other = await agent.lead(), await agent.attach()
        engines.at_load = lambda frame: loads.append(frame["path"])
        first, second = "1:7", "2:7"
        for identifier in (first, second):
            number = identifier.partition(":")[0]
            frame = {"op": "load", "id": identifier, "adapter": "ft:m", "transfer": f"{number}:8"}
            connection = agent.relay._connections[number]
            agent.relay._request(connection, "load", frame, encoded(frame))
        agent.relay._note_change({"error": "no files"}, first)
        await until_async(lambda: len(loads) == 2)
        assert [one[-4:] for one in loads] == ["/1/8", "/2/8"]
        await other.load("ft:m", adapter)
        assert await leader.generate(replace(REQUEST, adapter="ft:m")).read_all() == [5, 6]

    playing(engines, tmp_path, act)


def test_a_request_for_an_adapter_that_the_leader_has_unloaded_comes_back_as_lost(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    adapter, unloaded = adapter_in(tmp_path), list[str]()

    async def act(agent: PlayedAgent) -> None:
        leader, other = await agent.lead(), await agent.attach()
        other.on_unloaded = unloaded.append
        await other.load("ft:m", adapter)
        await leader.unload("ft:m")
        await leader.unload("ft:m")  # once is enough
        request = replace(REQUEST, adapter="ft:m")
        with pytest.raises(ReplicaLost, match="has unloaded the adapter"):
            await other.generate(request).read_all()
        with pytest.raises(ReplicaLost, match="has unloaded the adapter"):
            await other.embed(replace(TEXTS, adapter="ft:m"))
        assert unloaded == ["ft:m", "ft:m"]
        await other.load("ft:m", adapter)
        engines.may_answer.clear()
        generation = other.generate(request)
        await running(engines, 1)
        with pytest.raises(ReplicaRefused, match="in use"):
            await leader.unload("ft:m")
        engines.may_answer.set()
        assert await generation.read_all() == [5, 6]
        assert await other.generate(request).read_all() == [5, 6]

    playing(engines, tmp_path, act)


def test_heartbeats_say_how_busy_others_keep_the_replica(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    async def act(agent: PlayedAgent) -> None:
        leader, other = await agent.lead(), await agent.attach()
        engines.may_answer.clear()
        generations = [other.generate(REQUEST), other.generate(REQUEST)]
        await running(engines, 2)
        agent.relay.send_heartbeat()
        await until_async(lambda: leader.heartbeats == other.heartbeats == 1)
        assert (leader.others, other.others) == (2, 0)
        engines.may_answer.set()
        for one in generations:
            await one.read_all()
        agent.relay.send_heartbeat()
        await until_async(lambda: leader.heartbeats == 2)
        assert leader.others == 0

    playing(engines, tmp_path, act)


def test_a_leader_may_leave_its_agent_to_the_next_one(
    engines: PlayedEngines, tmp_path: Path
) -> None:
    async def act(agent: PlayedAgent) -> None:
        leader, other = await agent.lead(1), await agent.attach()
        await leader.leave()
        assert await other.generate(REQUEST).read_all() == [5, 6]
        later = await agent.lead(2)
        assert not agent.relay.over.is_set()
        assert agent.ended == []
        await later.aclose()
        assert agent.relay.over.is_set()

    playing(engines, tmp_path, act)
