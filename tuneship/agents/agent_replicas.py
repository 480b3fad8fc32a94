"""Opens replicas that agents run: starts an agent, reads where it listens, connects, and orders the replica.

Implements `OpenReplica` of `replica_protocol.py`, so a group starts, watches, drains and replaces them like others.
"""

import signal
from functools import partial
from pathlib import Path

from tuneship.agents.agent_starter import AgentStarter
from tuneship.agents.launchers import CannotLaunch
from tuneship.agents.listening_agents import ONLY_EPOCH
from tuneship.replicas.replica_protocol import OpenedReplica
from tuneship.serving.replica_client import ReplicaLost


class AgentWorker:
    """Stands for the process, which ends with the agent when its link is closed. Obeys `Worker`."""

    def __init__(self, pid: int) -> None:
        """`pid`: process id of the replica on its node."""
        self.pid = pid
        self._code: int | None = None

    def exit_code(self) -> int | None:
        """Return None until it was ended: that an agent ends by itself is known from its link."""
        return self._code

    def stop(self) -> None:
        """Note that it was ended."""
        self._code = -signal.SIGTERM

    def kill(self) -> None:
        """Note that it was ended."""
        self._code = -signal.SIGKILL


class AgentReplicas:
    """Opens replicas on agents. Obeys `OpenReplica`."""

    def __init__(self, starter: AgentStarter) -> None:
        """`starter`: of this service alone."""
        self._starter = starter

    async def __call__(self, base: Path, log: Path) -> OpenedReplica:  # noqa: ARG002 - the agent's output is elsewhere
        """Return when the base model is loaded. Raises `ServingError`, and `OSError` if the model cannot be read."""
        order = await self._starter.order_for(base)
        name = self._starter.new_name()
        end = partial(self._starter.end, name)
        try:
            address = await self._starter.start(name, base)
            link = await self._starter.connect(address, ONLY_EPOCH, order, end)
        except CannotLaunch as error:
            await end()
            raise ReplicaLost(f"no agent can be started: {error}") from error
        except BaseException:  # refused, lost or cancelled: leave no agent behind
            await end()
            raise
        return OpenedReplica(AgentWorker(link.facts.pid), link)
