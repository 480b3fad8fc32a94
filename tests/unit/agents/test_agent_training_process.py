"""The program of an agent with a real training process: whatever stands still, nothing computes without a lease."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.cluster.agents import AUTHORITY
from tests.support.cluster.training_nodes import order_for
from tests.support.fakes.swallowing_proxy import SwallowingProxy
from tests.support.models.tiny_model import build_tiny_model
from tests.support.service.processes import rows_file
from tests.support.waiting import children, is_alive, until_async
from tuneship.agents.agent_link import AgentAccess
from tuneship.agents.agent_protocol import AgentAddress
from tuneship.agents.agent_training_link import AgentTrainingLink
from tuneship.agents.training_protocol import ATTEMPT
from tuneship.host.deadline_file import is_past
from tuneship.host.thread_pools import Threads
from tuneship.processes.launch import WRITE
from tuneship.training.spec import LEASE_FILE, NO_KEYS

pytestmark = pytest.mark.slow
AGENT = [
    *(sys.executable, "-m", "tuneship.agents.agent", "--kind", "train"),
    *("--trust", AUTHORITY.trusted, "--host", "127.0.0.1"),
]


@pytest.fixture
def agent() -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(AGENT, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


# Each waits for the end of a lease, half a minute.
SOAK = ("cut off", "the agent", "none", *(19 * ("both", "cut off")))


@pytest.mark.parametrize(
    "stopped",
    [
        "both",
        *(
            pytest.param(how, id=f"{how}, {number}", marks=pytest.mark.soak)
            for number, how in enumerate(SOAK)
        ),
    ],
)
def test_both_end_when_the_lease_is_over(
    agent: "subprocess.Popen[str]", tmp_path: Path, stopped: str
) -> None:
    assert agent.stdout is not None
    address = AgentAddress.said_in(agent.stdout.readline())
    assert address is not None
    renewals = Renewals()

    async def run() -> None:
        proxy = SwallowingProxy(address.host, address.port)
        async with proxy.listening() as (host, port):
            near = replace(address, host=host, port=port)
            link = await trained(near, tmp_path, renewals)
            (trainer,) = children(agent.pid)
            lease = lease_of(trainer)
            if stopped == "cut off":
                proxy.cuts.set()
            else:
                renewals.are_refused = True
            pids = {"both": (agent.pid, trainer), "the agent": (agent.pid,)}.get(stopped, ())
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            if stopped == "both":  # nobody can end them now, so they go on when it is over
                await until_async(lambda: is_past(lease))
                assert is_alive(trainer)
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            await until_async(lambda: not is_alive(trainer))
            print(f"{stopped}: gone {renewals.ago_s():.1f} s after the last renewal")  # noqa: T201
            if stopped == "the agent":
                os.kill(agent.pid, signal.SIGCONT)
            await until_async(lambda: agent.poll() is not None)
            await link.aclose()

    asyncio.run(run())


class Renewals:
    """The leader's answers to an agent that asks for its lease."""

    def __init__(self) -> None:
        self.are_refused = False
        self._last = time.monotonic()

    async def answer(self, _: int) -> bool:
        if not self.are_refused:
            self._last = time.monotonic()
        return not self.are_refused

    def ago_s(self) -> float:
        """How long ago the last one was granted."""
        return time.monotonic() - self._last


async def trained(address: AgentAddress, folder: Path, renewals: Renewals) -> AgentTrainingLink:
    """Let an agent train, and wait until it has done a step."""
    base, data = build_tiny_model(folder / "tiny"), rows_file(folder / "data.jsonl", 64)
    access = AgentAccess(AUTHORITY.client_context(datetime.now(UTC)), 1, version("tuneship"))
    link = await AgentTrainingLink.open(address, access, Threads("test", 1), renewals.answer)
    await link.send_file(data, "inputs/training/data.jsonl")
    await link.train(replace(order_for(base, epochs=100_000), keys=NO_KEYS))
    offset = 0
    while '"kind": "step"' not in (news := await link.news(offset, 0, 60)).lines:
        offset += len(news.lines)
    return link


def lease_of(trainer: int) -> Path:
    """The file with the deadline that a training process obeys."""
    command = Path(f"/proc/{trainer}/cmdline").read_bytes().decode().split("\0")
    (folder,) = (part.removeprefix(WRITE) for part in command if part.endswith(f"/{ATTEMPT}"))
    return Path(folder) / LEASE_FILE
