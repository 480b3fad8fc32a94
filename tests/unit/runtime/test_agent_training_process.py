"""The program of an agent with a real training process: whatever stands still, nothing computes without a lease."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.agents import AUTHORITY
from tests.support.processes import rows_file
from tests.support.tiny_model import build_tiny_model
from tests.support.training_nodes import order_for
from tests.support.waiting import children, is_alive, until_async
from tuneship.host.deadline_file import is_past
from tuneship.host.thread_pools import Threads
from tuneship.runtime.agent_link import AgentAccess
from tuneship.runtime.agent_protocol import AgentAddress
from tuneship.runtime.agent_training_link import AgentTrainingLink
from tuneship.training.spec import LEASE_FILE, NO_KEYS

pytestmark = pytest.mark.slow
AGENT = [
    *(sys.executable, "-m", "tuneship.runtime.agent", "--kind", "train"),
    *("--trust", AUTHORITY.trusted, "--host", "127.0.0.1"),
]


@pytest.fixture
def agent() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(AGENT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(
    "stopped",
    [
        "both",
        pytest.param(
            "the agent", marks=pytest.mark.soak
        ),  # each waits for the lease, half a minute
        pytest.param("none", marks=pytest.mark.soak),
    ],
)
def test_both_end_when_the_lease_is_over(
    agent: "subprocess.Popen[str]", tmp_path: Path, stopped: str
) -> None:
    base, data = build_tiny_model(tmp_path / "tiny"), rows_file(tmp_path / "data.jsonl", 64)
    order = replace(order_for(base, epochs=100_000), keys=NO_KEYS)
    assert agent.stdout is not None
    address = AgentAddress.said_in(agent.stdout.readline())
    assert address is not None
    may_go_on = True

    async def renew(_: int) -> bool:
        return may_go_on

    async def run() -> None:
        nonlocal may_go_on
        access = AgentAccess(AUTHORITY.client_context(datetime.now(UTC)), 1, version("tuneship"))
        link = await AgentTrainingLink.open(address, access, Threads("test", 1), renew)
        await link.send_file(data, "inputs/training/data.jsonl")
        await link.train(order)
        offset = 0
        while '"kind": "step"' not in (news := await link.news(offset, 0, 60)).lines:
            offset += len(news.lines)
        (trainer,) = children(agent.pid)
        lease = lease_of(trainer)
        may_go_on = False
        pids = {"both": (agent.pid, trainer), "the agent": (agent.pid,), "none": ()}[stopped]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        if stopped == "both":  # nobody can end them now, so they go on when it is over
            await until_async(lambda: is_past(lease))
            assert is_alive(trainer)
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await until_async(lambda: not is_alive(trainer))
        if stopped == "the agent":
            os.kill(agent.pid, signal.SIGCONT)
        await until_async(lambda: agent.poll() is not None)
        await link.aclose()

    asyncio.run(run())


def lease_of(trainer: int) -> Path:
    """The file with the deadline that a training process obeys."""
    command = Path(f"/proc/{trainer}/cmdline").read_bytes().decode().split("\0")
    folder = command[command.index("tuneship.training") + 1]
    return Path(folder) / LEASE_FILE
