"""Starts agents for the next attempts of jobs with lost agents, while the lease of the last attempt still lasts.

Such an agent loads what every training needs, and waits. It has no order and computes nothing: that takes a claim of
the job, which nobody gets before the lease is over. So the seconds of the start are not added to those of the lease.
"""

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from tuneship.agents.agent_training_link import AgentTrainingLink, TrainingAgentLost
from tuneship.agents.launchers import AgentSize
from tuneship.agents.training_agents import TrainingAgent, TrainingAgents
from tuneship.agents.training_protocol import GONE_S
from tuneship.host.thread_pools import Threads

# An agent that was not taken so long after it was asked for is ended: its job may wait behind others for hours.
KEPT_S = 2 * GONE_S

Waiting = tuple[TrainingAgent, AgentTrainingLink]


class NextAgents:
    """At most one waiting agent for a job."""

    def __init__(self, agents: TrainingAgents, threads: Threads) -> None:
        """`agents`: starts the agents. `threads`: for connections to them."""
        self.agents = agents
        self._threads = threads
        self._waiting: dict[str, asyncio.Task[Waiting]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def prepare(self, job_id: str, base: Path, size: AgentSize) -> None:
        """Start an agent for the next attempt of a job, unless there is one; call it again if that one is lost."""
        starting = self._waiting.get(job_id)
        if starting is not None and _is_of_use(starting):
            return
        self.drop(job_id)
        starting = asyncio.create_task(self._start(base, size))
        self._waiting[job_id] = starting
        asyncio.get_running_loop().call_later(KEPT_S, self._expire, job_id, starting)

    async def take(self, job_id: str) -> TrainingAgent | None:
        """Wait for a job's prepared agent and hand it over; None if none answers."""
        starting = self._waiting.get(job_id)
        if starting is None:
            return None
        await asyncio.wait([starting])
        if self._waiting.get(job_id) is not starting:
            return None  # it was dropped meanwhile
        if not _is_of_use(starting):
            self.drop(job_id)
            return None
        del self._waiting[job_id]
        agent, link = starting.result()
        await link.aclose()
        return agent

    def drop(self, job_id: str) -> None:
        """End a job's prepared agent, if there is one, since it is not needed."""
        starting = self._waiting.pop(job_id, None)
        if starting is not None:
            self._spawn(self._end(starting))

    async def stop(self) -> None:
        """End all prepared agents."""
        for job_id in [*self._waiting]:
            self.drop(job_id)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _start(self, base: Path, size: AgentSize) -> Waiting:
        """Raises `CannotLaunch`, `TrainingRefused` and `TrainingAgentLost`."""
        agent = await self.agents.start(size)
        try:
            link = await AgentTrainingLink.open(
                agent.address, self.agents.access(), self._threads, _never
            )
            await link.warm(base, isolated=self.agents.isolated)
        except BaseException:
            self._spawn(self.agents.end(agent.name))
            raise
        return agent, link

    async def _end(self, starting: "asyncio.Task[Waiting]") -> None:
        starting.cancel()  # does nothing to one that has started
        await asyncio.wait([starting])
        if not starting.cancelled() and starting.exception() is None:
            agent, link = starting.result()
            with suppress(TrainingAgentLost):
                await link.stop()
            await link.aclose()
            await self.agents.end(agent.name)

    def _expire(self, job_id: str, starting: "asyncio.Task[Waiting]") -> None:
        if self._waiting.get(job_id) is starting:
            self.drop(job_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _is_of_use(starting: "asyncio.Task[Waiting]") -> bool:
    """Whether an agent starts, or has started and answers."""
    if not starting.done():
        return True
    if starting.cancelled() or starting.exception() is not None:
        return False
    _, link = starting.result()
    return not link.is_lost


async def _never(_number: int) -> bool:
    """Renew no lease: it has none."""
    return False
