"""Nodes in the test's process: real agents of trainings, reached over real TLS, whose processes are played."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster.agents import VERSION, access, listening
from tests.support.service.engines import PlayedEngines
from tests.support.waiting import until_disconnected
from tuneship.agents import agent_training
from tuneship.agents.agent_link import AgentAccess
from tuneship.agents.agent_protocol import AgentAddress
from tuneship.agents.agent_training import AgentTraining
from tuneship.agents.base_digest import BaseDigests
from tuneship.agents.launchers import AgentSize, CannotLaunch
from tuneship.agents.training_agents import TrainingAgent
from tuneship.agents.training_protocol import TrainOrder
from tuneship.training.spec import DataKeys, ResolvedHyperparameters, TrainingSpec

HEARTBEAT_S = 0.05


def spec_of(epochs: int = 1) -> TrainingSpec:
    """The specification that a service sends."""
    return TrainingSpec(
        base_model="elsewhere",
        training_file=Path("/of/the/service/data.jsonl"),
        validation_file=None,
        dataset_format="instruction",
        output_dir=Path("/of/the/service/output"),
        checkpoint_dir=Path("/of/the/service/checkpoints"),
        validation_frequency=1.0,
        max_runtime_seconds=3600.0,
        threads=0,
        hyperparameters=ResolvedHyperparameters(1e-3, 8, epochs, 0, 4, 8.0, 0.0, ("q_proj",), 1),
    )


def order_for(base: Path, epochs: int = 1) -> TrainOrder:
    """An order to train on `inputs/training/data.jsonl`."""
    keys = DataKeys(training="key of the data")
    return TrainOrder(str(base), BaseDigests().of(base), False, spec_of(epochs).to_json(), keys)


class TrainingNode:
    """One agent, which listens."""

    def __init__(self, folder: Path, check_isolation: Callable[[Path], None]) -> None:
        """`folder`: for its files. Call `listen` next."""
        self.folder = folder
        self.agent = AgentTraining(folder, VERSION, check_isolation)

    async def listen(self) -> AgentAddress:
        self._server, address = await listening(self.agent.serve)
        self._heartbeat_task = asyncio.create_task(self._send_heartbeats())
        return address

    async def _send_heartbeats(self) -> None:
        while not self.agent.over.is_set():
            self.agent.send_heartbeat()
            with suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self.agent.over.wait()

    async def close(self) -> None:
        """End everything, as when the node fails."""
        self._server.close()
        self._heartbeat_task.cancel()
        await self.agent.close()
        await until_disconnected(self._server)


class TrainingNodes:
    """Nodes that have room as long as the test says so. Stands for `TrainingAgents`."""

    isolated = False
    end_with_service = False

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """`folder`: for the files of all nodes."""
        self.engines = PlayedEngines([])
        monkeypatch.setattr(agent_training, "LocalProcesses", lambda **_: self.engines)
        self._folder = folder
        self.nodes: list[TrainingNode] = []
        self.has_room = True
        # The size that each start asked for.
        self.sizes: list[AgentSize] = []
        # How often there was no room.
        self.refused = 0

    async def start(self, size: AgentSize) -> TrainingAgent:
        self.sizes.append(size)
        if not self.has_room:
            self.refused += 1
            raise CannotLaunch("no node had room")
        node = TrainingNode(self._folder / f"node-{len(self.nodes)}", lambda _: None)
        self.nodes.append(node)
        return TrainingAgent(str(len(self.nodes) - 1), await node.listen(), size)

    def access(self) -> AgentAccess:
        return access()

    async def end(self, name: str) -> None:
        """Do nothing, as if the launcher were away: the agent ends by itself."""

    def trainer(self, number: int) -> Any:
        return self.engines.trainers[number]
