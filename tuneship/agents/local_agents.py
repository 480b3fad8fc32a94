"""Agents as processes of this machine. They end with the service; in a cluster they outlive it."""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from tuneship.agents.launchers import AgentSize, AgentState, CannotLaunch
from tuneship.host.thread_pools import Threads
from tuneship.processes.worker_protocol import Runtime, Worker, WorkerSpec

READ_BYTES = 4096


class _LocalAgent:
    """A started agent, and the pipe on which it reports its address."""

    def __init__(self, worker: Worker, reader: int) -> None:
        self.worker = worker
        self._reader = reader
        self._said = b""

    def said(self) -> str:
        """The text that has arrived on the pipe so far."""
        with suppress(BlockingIOError):
            while part := os.read(self._reader, READ_BYTES):
                self._said += part
        return self._said.decode(errors="replace")

    def end(self) -> None:
        """Kill the process and wait until it has ended."""
        os.close(self._reader)
        self.worker.kill()


class LocalAgents:
    """Starts agents that listen on the loopback interface. Obeys `Launcher`."""

    is_here = True

    def __init__(self, runtime: Runtime, log: Path, *, outlive_service: bool = False) -> None:
        """`log`: file for the output of all agents and their replicas."""
        self._outlive_service = outlive_service
        self._runtime = runtime
        self._log = log
        self._agents: dict[str, _LocalAgent] = {}
        self._threads = Threads("end of an agent", 4)

    async def start(
        self,
        name: str,
        arguments: Sequence[str],
        size: AgentSize | None = None,  # noqa: ARG002 - nothing is set aside on this machine
    ) -> None:
        """Start a process. Raises `CannotLaunch`."""
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        more = ("--outlives-parent",) if self._outlive_service else ()
        spec = WorkerSpec(
            module="tuneship.agents.agent",
            arguments=(*arguments, "--host", "127.0.0.1", "--ready-fd", str(writer), *more),
            log=self._log,
            inherited=(writer,),
            needs_network=True,
        )
        try:
            self._agents[name] = _LocalAgent(self._runtime.start(spec), reader)
        except OSError as error:
            os.close(reader)
            raise CannotLaunch(f"no process can be started: {error.strerror}") from error
        finally:
            os.close(writer)

    async def state(self, name: str) -> AgentState:
        """Read the agent's output."""
        agent = self._agents[name]
        has_ended = agent.worker.exit_code() is not None
        return AgentState(agent.said(), has_ended)

    async def end(self, name: str) -> None:
        """Kill the agent; its replica ends with it."""
        agent = self._agents.pop(name, None)
        if agent is not None:
            await self._threads.run(agent.end)

    async def begin(self, prefix: str, keep: Collection[str] = ()) -> None:
        """Do nothing: agents of an earlier service have ended with it, or end soon, since no service is connected to
        them.
        """
