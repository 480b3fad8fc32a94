"""The program of an agent, as a process: it says where it listens, runs one replica, and does not outlive its use."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.models.tiny_model import build_tiny_model
from tests.support.waiting import free_port, is_alive, until, until_async
from tuneship.agents import agent
from tuneship.agents.agent import NodeReplica, own_folder, port_range
from tuneship.agents.agent_protocol import (
    LEADER,
    PROTOCOL,
    AgentAddress,
    CannotServe,
    ServeOrder,
)
from tuneship.agents.agent_sockets import encoded
from tuneship.agents.agent_starter import AgentOptions, AgentStarter, BaseOptions
from tuneship.agents.base_digest import BaseDigests
from tuneship.agents.certificates import AgentAuthority
from tuneship.agents.local_agents import LocalAgents
from tuneship.processes.worker_processes import LocalProcesses
from tuneship.replicas.replica import Replica
from tuneship.serving.replica_client import GenerateRequest, ReplicaLost, ReplicaRefused

AUTHORITY = AgentAuthority(b"s" * 32)
AGENT = [
    *(sys.executable, "-m", "tuneship.agents.agent"),
    *("--trust", AUTHORITY.trusted, "--host", "127.0.0.1"),
]
REQUEST = GenerateRequest(tokens=(5, 6), max_tokens=4, adapter=None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture
def started() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start agents as programs."""
    with ExitStack() as ending:

        def start(*arguments: str) -> "subprocess.Popen[str]":
            process = subprocess.Popen(
                [*AGENT, *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ending.enter_context(process)
            ending.callback(process.kill)
            return process

        yield start


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def opened(base: Path, folder: Path, act: Callable[[Replica], Awaitable[None]]) -> None:
    """Open a replica of a base model on an agent of this process."""

    async def run() -> None:
        launcher = LocalAgents(LocalProcesses(isolated=False), folder / "log")
        options = AgentOptions(False, 0, 1, lambda _: BaseOptions(), 60)
        starter = AgentStarter(launcher, AUTHORITY, "t", options, lambda: datetime.now(UTC))
        replica = await starter.start_replica(base, folder / "unused")
        try:
            await act(replica)
        finally:
            await replica.link.aclose()

    asyncio.run(run())


@pytest.mark.slow
def test_it_runs_a_replica_and_ends_when_it_is_ordered_to(base: Path, tmp_path: Path) -> None:
    agents = list[int]()

    async def act(replica: Replica) -> None:
        assert len(await replica.link.generate(REQUEST).read_all()) == 4
        agents.append(parent_of(replica.worker.pid))

    opened(base, tmp_path, act)
    until(lambda: not is_alive(agents[0]))


@pytest.mark.slow
def test_it_ends_with_its_replica(base: Path, tmp_path: Path) -> None:
    async def act(replica: Replica) -> None:
        parent = parent_of(replica.worker.pid)
        os.kill(replica.worker.pid, signal.SIGKILL)
        assert isinstance(await replica.link.wait_lost(), ReplicaLost)
        await until_async(lambda: not is_alive(parent))

    opened(base, tmp_path, act)


@pytest.mark.slow
def test_another_base_model_on_the_node_is_refused(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseDigests, "of", lambda *_: "0" * 64)

    async def act(_: Replica) -> None: ...

    with pytest.raises(ReplicaRefused, match="base model tiny of the node is another one"):
        opened(base, tmp_path, act)


@pytest.mark.slow
@pytest.mark.parametrize("still_open", [["a way out"], None])
def test_a_node_that_cannot_isolate_serves_nobody_who_needs_it(
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    still_open: list[str] | None,
) -> None:
    def open_ways(*_: object, **__: object) -> list[str]:
        if still_open is None:
            raise ValueError
        return still_open

    monkeypatch.setattr(agent, "open_ways", open_ways)
    digest = BaseDigests().of(base)
    replica = NodeReplica(tmp_path, tmp_path)

    async def run() -> None:
        order = ServeOrder(str(base), digest, True, 0, 1, None)
        with pytest.raises(CannotServe, match=r"cannot isolate a worker: (a way out$|the test)"):
            await replica.start(order)
        _, writer = await replica.start(replace(order, isolated=False))
        replica.end()
        writer.close()

    asyncio.run(run())


def test_the_digest_is_that_of_the_files(base: Path, tmp_path: Path) -> None:
    copy, digests = tmp_path / "copy", BaseDigests()
    shutil.copytree(base, copy)
    assert digests.of(copy) == digests.of(base)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    assert digests.of(copy) != digests.of(base)
    with pytest.raises(FileNotFoundError):
        digests.of(tmp_path / "nothing")


@pytest.mark.slow
def test_it_ends_when_nobody_connects(started: Callable[..., "subprocess.Popen[str]"]) -> None:
    process = started("--alone-s", "0")
    assert process.stdout is not None
    assert AgentAddress.said_in(process.stdout.readline()) is not None
    assert process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["serve", "train"])
def test_it_ends_quietly_when_a_service_does_not_answer(
    started: Callable[..., "subprocess.Popen[str]"], kind: str
) -> None:
    process = started("--kind", kind)
    assert process.stdout is not None
    address = AgentAddress.said_in(process.stdout.readline())
    assert address is not None
    context = AUTHORITY.client_context(datetime.now(UTC))
    hello = {"op": "hello", "role": LEADER, "epoch": 1, "protocol": PROTOCOL}
    with (
        socket.create_connection((address.host, address.port)) as plain,
        context.wrap_socket(plain) as connection,
    ):
        connection.sendall(encoded(hello))
        assert b"hello" in connection.recv(4096)
        process.send_signal(signal.SIGTERM)
        # Nobody reads, so the end of the connection is not confirmed.
        (line,) = process.communicate(timeout=60)[1].splitlines()
    assert line == "WARNING __main__ the agent ends and cuts connections on which nobody answers"
    assert process.returncode == 0


@pytest.mark.slow
def test_it_dies_with_its_parent() -> None:
    program = (
        "import subprocess, sys, time\n"
        "agent = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, text=True)\n"
        "agent.stdout.readline()\nprint(agent.pid, flush=True)\ntime.sleep(600)"
    )
    command = [sys.executable, "-c", program, *AGENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        process = int(parent.stdout.readline())
        assert is_alive(process)
        parent.kill()
    until(lambda: not is_alive(process))


@pytest.mark.slow
def test_it_refuses_what_it_cannot_use(started: Callable[..., "subprocess.Popen[str]"]) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        taken = started("--ports", str(port))
        assert f"no free port in {port}-{port}" in taken.communicate(timeout=60)[1]
    assert taken.returncode != 0


@pytest.mark.slow
def test_files_of_a_killed_agent_are_removed_by_the_next_one(
    started: Callable[..., "subprocess.Popen[str]"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))

    def folder_of_another() -> Path:
        before = set(tmp_path.glob("*/agent-*"))
        process = started()
        assert process.stdout is not None
        assert AgentAddress.said_in(process.stdout.readline()) is not None
        (folder,) = set(tmp_path.glob("*/agent-*")) - before
        (folder / "files" / "data.jsonl").write_text("text of a patient")
        processes[folder] = process
        return folder

    processes: dict[Path, subprocess.Popen[str]] = {}
    killed, alive = folder_of_another(), folder_of_another()
    processes[killed].kill()
    processes[killed].wait()
    third = folder_of_another()
    assert set(tmp_path.glob("*/agent-*")) == {alive, third}
    assert (alive / "files" / "data.jsonl").exists()
    processes[third].terminate()
    assert processes[third].wait(60) == 0
    assert not third.exists()


@pytest.mark.parametrize("other", ["a link", "a folder that others may write to"])
def test_it_uses_no_folder_that_somebody_else_may_have_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    own = own_folder()
    assert own == own_folder()
    own.rmdir()
    if other == "a link":
        own.symlink_to(tmp_path)
    else:
        own.mkdir()
        own.chmod(0o777)
    with pytest.raises(PermissionError, match="not a private folder"):
        own_folder()


def test_ports_are_a_range() -> None:
    assert list(port_range("5-7")) == [5, 6, 7]
    assert list(port_range("0")) == [0]
    for text in ("7-5", "a", "1-65536", "-1", ""):
        with pytest.raises(ValueError):
            port_range(text)


def test_a_ready_line_is_found_among_others() -> None:
    address = AgentAddress("10.0.0.7", 20001, "ab" * 32)
    text = f"Running entrypoint for job x: exec python\n{address.ready_line()}\nloading\n"
    assert AgentAddress.said_in(text) == address
    for other in ("", "ready", text.replace("ab" * 32, "ab"), f"not {address.ready_line()}"):
        assert AgentAddress.said_in(other) is None
