"""The protocol for starting and ending agents anywhere; `local_agents.py` and `ray_jobs.py` implement it.

A launcher places programs and nothing else: whether a replica lives is known from the connection to its agent.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


class CannotLaunch(Exception):
    """No agent can be started or ended; the text says why, and holds no secret."""


class LauncherAway(CannotLaunch):
    """The launcher does not answer now; a retry may succeed."""


@dataclass(frozen=True)
class AgentSize:
    """The resources that are set aside for an agent on its node."""

    cpus: float
    gpus: float
    # 0: none in particular.
    memory_bytes: int
    # Labels that the node must have.
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class AgentState:
    """The state of a started program, as its launcher reports it."""

    # The text that it has printed so far.
    said: str = ""
    has_ended: bool = False


class Launcher(Protocol):
    """Starts agents and ends them."""

    @property
    def is_here(self) -> bool:
        """Whether the agents are processes of this machine."""
        ...

    async def start(
        self, name: str, arguments: Sequence[str], size: AgentSize | None = None
    ) -> None:
        """Start an agent under a name that was never used; the launcher adds where it listens. Raises `CannotLaunch`.

        `size`: None leaves it to the launcher; on this machine nothing is set aside.
        Called on the event loop's own thread: the parent-death signal follows the thread that starts a process.
        """
        ...

    async def state(self, name: str) -> AgentState:
        """Look at a started agent. Raises `CannotLaunch`."""
        ...

    async def end(self, name: str) -> None:
        """Have an agent ended, if it still runs. May be called again. Raises `CannotLaunch`."""
        ...

    async def begin(self, prefix: str, keep: Collection[str] = ()) -> None:
        """Prepare the first start: end agents that an earlier service left behind, found by this prefix of their names.

        Those in `keep` go on. Raises `CannotLaunch`, also where agents must not be started.
        """
        ...
