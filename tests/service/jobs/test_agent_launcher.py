"""Trainings on nodes, whose agents are real and whose processes are played: what comes back, and who may go on when."""

import json
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from tests.support.cluster.training_nodes import TrainingNodes
from tests.support.service.in_process import Service
from tuneship.agents.agent_training_link import TrainingAgentLost
from tuneship.agents.launchers import AgentSize
from tuneship.agents.training_protocol import GONE_S
from tuneship.service.jobs import agent_launcher
from tuneship.service.jobs.agent_launcher import NodeTraining
from tuneship.service.recovery import recover
from tuneship.store.database import tables
from tuneship.training.checkpoint_folders import step_folder
from tuneship.training.spec import CANCEL_FILE, FORMAT_FILE


class Elapsed:
    """A monotonic clock that a test can move."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def elapsed(monkeypatch: pytest.MonkeyPatch) -> Elapsed:
    clock = Elapsed()
    monkeypatch.setattr(agent_launcher, "time", SimpleNamespace(monotonic=clock.monotonic))
    return clock


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainingNodes:
    return TrainingNodes(tmp_path / "nodes", monkeypatch)


@pytest.fixture
def service(
    start: Callable[..., Service], nodes: TrainingNodes, elapsed: Elapsed
) -> Iterator[Service]:
    service = start(training_agents=nodes)
    yield service
    for node in nodes.nodes:
        service.run(node.close())


def trainer_of(service: Service, nodes: TrainingNodes, number: int) -> Any:
    """Wait until a process has its order."""
    trainer = process_of(service, nodes, number)
    service.until(lambda: any(node.agent._worker is trainer for node in nodes.nodes))
    return trainer


def process_of(service: Service, nodes: TrainingNodes, number: int) -> Any:
    """Wait until a process was started, which may still wait for its order."""
    service.until(lambda: len(nodes.engines.trainers) > number)
    return nodes.trainer(number)


def row_of(service: Service, job_id: str) -> Any:
    with service.database.read() as connection:
        query = sa.select(tables.jobs).where(tables.jobs.c.id == job_id)
        return connection.execute(query).mappings().one()


def keep(trainer: Any, step: int) -> None:
    """Save a checkpoint on the node, as a training process does."""
    folder = trainer.folder.parent / "checkpoints"
    (folder / FORMAT_FILE).write_text("float32")
    unfinished = folder / ".tmp-step"
    unfinished.mkdir()
    (unfinished / "state.json").write_text(f"state {step}")
    unfinished.rename(step_folder(folder, step))


def test_a_job_is_trained_on_a_node_and_its_model_is_here(
    service: Service, nodes: TrainingNodes
) -> None:
    job_id = service.job()
    trainer = trainer_of(service, nodes, 0)
    assert service.engines.trainers == []
    assert nodes.nodes[0].folder in trainer.folder.parents
    trainer.start_of(2)
    trainer.step(1)
    service.until(lambda: row_of(service, job_id)["current_step"] == 1)
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    service.until(nodes.nodes[0].agent.over.is_set)
    tuned = service.call("GET", f"/v1/fine-tuning/jobs/{job_id}").json()["fine_tuned_model"]
    deployment = service.deployment("d", model_name=tuned)
    answer = service.call("POST", f"/v1/deployments/{deployment}/generate", json={"prompt": "x"})
    assert answer.status_code == 200
    service.until(lambda: not (service.settings.data_dir / "work" / job_id).exists())


def test_the_compared_adapter_is_sent_to_the_node(service: Service, nodes: TrainingNodes) -> None:
    first = service.job()
    trainer = trainer_of(service, nodes, 0)
    trainer.start_of(1)
    trainer.complete()
    service.until(lambda: service.job_status(first) == "completed")
    tuned = service.call("GET", f"/v1/fine-tuning/jobs/{first}").json()["fine_tuned_model"]
    service.job(comparison={"model": tuned})
    spec = json.loads((trainer_of(service, nodes, 1).folder / "spec.json").read_text())
    folder = Path(spec["compared_adapter"])
    assert (folder.name, folder.parent.name) == ("compared", "inputs")
    assert (folder / "adapter_model.safetensors").is_file()


TYPES = """
instance_types:
  - {name: large, compute_type: gpu, cpus: 16, memory_gb: 1.5, gpus: 4, node_labels: {zone: b}}
  - {name: cores, compute_type: cpu, cpus: 1}
"""


def test_the_agent_of_every_attempt_gets_what_the_instance_type_asks_for(
    start: Callable[..., Service], nodes: TrainingNodes, tmp_path: Path
) -> None:
    file = tmp_path / "types.yaml"
    file.write_text(TYPES)
    service = start(
        training_agents=nodes,
        instance_catalogue=file,
        agents="ray",
        ray_urls=("http://127.0.0.1:1",),
        ray_token_file=file,
        agent_cpus=2.5,
        agent_gpus=1,
        agent_memory_bytes=7,
        concurrent_jobs=4,
    )
    for number, name in enumerate(("large", "cores", "local")):
        service.job(compute_config={"instance_type": name})
        trainer_of(service, nodes, number).start_of(2)
    assert nodes.sizes == [
        AgentSize(16, 4, 3 << 29, {"zone": "b"}),
        AgentSize(1, 0, 7),
        AgentSize(2.5, 1, 7),
    ]
    service.run(nodes.nodes[0].close())  # the next attempt's agent is started at once
    service.until(lambda: len(nodes.sizes) == 4)
    assert nodes.sizes[3] == nodes.sizes[0]
    for node in nodes.nodes[1:]:
        service.run(node.close())


def test_the_next_attempt_goes_on_elsewhere_only_when_the_lease_of_a_lost_node_is_over(
    service: Service, nodes: TrainingNodes, elapsed: Elapsed
) -> None:
    job_id = service.job()
    trainer = trainer_of(service, nodes, 0)
    trainer.start_of(4)
    keep(trainer, 2)
    here = service.settings.data_dir / "work" / job_id / "checkpoints"
    service.until((step_folder(here, 2) / "state.json").exists)
    nodes.has_room = False
    service.run(nodes.nodes[0].close())
    service.until(lambda: any("connection to an agent" in line for line in service.log.texts))
    # The process may still run there: another job is begun meanwhile, and this one is not begun again.
    waiting = service.job()
    service.until(lambda: nodes.refused > 0)
    assert row_of(service, job_id)["attempt"] == 1
    service.call("POST", f"/v1/fine-tuning/jobs/{waiting}/cancel")
    nodes.has_room = True
    elapsed.ahead_s += GONE_S
    again = trainer_of(service, nodes, 1)
    assert row_of(service, job_id)["attempt"] == 2
    there = again.folder.parent / "checkpoints"
    assert (step_folder(there, 2) / "state.json").read_text() == "state 2"
    assert (there / FORMAT_FILE).read_text() == "float32"
    again.start_of(4, resumed_from=2)
    again.complete()
    service.until(lambda: service.job_status(job_id) == "completed")


def lost(service: Service, nodes: TrainingNodes) -> tuple[str, Any]:
    """A job whose node is lost, and the process that waits at the next one."""
    job_id = service.job()
    trainer_of(service, nodes, 0).start_of(4)
    service.until(lambda: row_of(service, job_id)["total_steps"] == 4)
    service.run(nodes.nodes[0].close())
    return job_id, process_of(service, nodes, 1)


def test_the_next_agent_is_ready_when_the_lease_of_a_lost_one_is_over_and_has_no_order_before(
    service: Service, nodes: TrainingNodes, elapsed: Elapsed
) -> None:
    job_id, waiting = lost(service, nodes)
    assert row_of(service, job_id)["attempt"] == 1
    assert nodes.nodes[1].agent._order is None
    elapsed.ahead_s += GONE_S
    assert trainer_of(service, nodes, 1) is waiting
    assert row_of(service, job_id)["attempt"] == 2
    waiting.start_of(4)
    waiting.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    assert len(nodes.nodes) == len(nodes.engines.trainers) == 2


def test_a_next_agent_that_is_lost_too_is_replaced(
    service: Service, nodes: TrainingNodes, elapsed: Elapsed
) -> None:
    job_id, waiting = lost(service, nodes)
    service.run(nodes.nodes[1].close())
    assert waiting.code is not None
    another = process_of(service, nodes, 2)
    assert row_of(service, job_id)["attempt"] == 1
    elapsed.ahead_s += GONE_S
    assert trainer_of(service, nodes, 2) is another
    another.start_of(4)
    assert row_of(service, job_id)["attempt"] == 2


def test_the_next_agent_ends_with_its_service(service: Service, nodes: TrainingNodes) -> None:
    _, waiting = lost(service, nodes)
    service.rest()
    assert waiting.code is not None
    assert nodes.nodes[1].agent.over.is_set()


def test_the_next_agent_ends_when_the_lost_one_answers_again(
    service: Service, nodes: TrainingNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_away, connected = True, NodeTraining._connected

    async def connected_or_not(training: NodeTraining) -> Any:
        if is_away:
            raise TrainingAgentLost("away")
        return await connected(training)

    async def disconnect() -> None:
        leader = nodes.nodes[0].agent._leader
        assert leader is not None
        leader.transport.abort()

    job_id = service.job()
    trainer = trainer_of(service, nodes, 0)
    trainer.start_of(4)
    service.until(lambda: row_of(service, job_id)["total_steps"] == 4)
    monkeypatch.setattr(NodeTraining, "_connected", connected_or_not)
    service.run(disconnect())
    waiting = process_of(service, nodes, 1)
    is_away = False
    service.until(nodes.nodes[1].agent.over.is_set)
    assert waiting.code is not None
    trainer.step(1)
    service.until(lambda: row_of(service, job_id)["current_step"] == 1)
    assert row_of(service, job_id)["attempt"] == 1


def test_a_cancellation_reaches_the_node_and_waits_for_the_process(
    service: Service, nodes: TrainingNodes
) -> None:
    job_id = service.job()
    trainer = trainer_of(service, nodes, 0)
    service.call("POST", f"/v1/fine-tuning/jobs/{job_id}/cancel")
    service.until((trainer.folder / CANCEL_FILE).exists)
    assert service.job_status(job_id) == "cancelling"
    trainer.code = 0
    service.until(lambda: service.job_status(job_id) == "cancelled")


def test_a_process_that_fails_is_followed_by_another_attempt_at_once(
    service: Service, nodes: TrainingNodes
) -> None:
    job_id = service.job()
    trainer = trainer_of(service, nodes, 0)
    trainer.start_of(4)
    keep(trainer, 3)
    trainer.code = -9
    again = trainer_of(service, nodes, 1)
    # What it had kept in its last moment has come along.
    there = step_folder(again.folder.parent / "checkpoints", 3)
    assert (there / "state.json").read_text() == "state 3"
    assert row_of(service, job_id)["attempts_without_progress"] == 0


def test_a_job_waits_for_room_without_an_attempt_that_counts(
    service: Service, nodes: TrainingNodes
) -> None:
    nodes.has_room = False
    job_id = service.job()
    for number in range(1, 5):
        service.until(lambda number=number: nodes.refused >= number)
        service.clock.ahead += timedelta(minutes=1)
    assert row_of(service, job_id)["attempts_without_progress"] == 0
    nodes.has_room = True
    service.clock.ahead += timedelta(minutes=1)
    trainer_of(service, nodes, 0).start_of(2)
    service.until(lambda: row_of(service, job_id)["total_steps"] == 2)


def test_a_job_is_given_back_at_the_end_when_its_process_is_known_to_be_gone(
    service: Service, nodes: TrainingNodes
) -> None:
    job_id = service.job()
    trainer = trainer_of(service, nodes, 0)
    service.rest()
    assert trainer.code is not None
    assert row_of(service, job_id)["lease_until"] < service.clock()


def test_a_job_keeps_its_lease_at_the_end_when_its_agent_does_not_answer(
    service: Service, nodes: TrainingNodes
) -> None:
    job_id = service.job()
    trainer_of(service, nodes, 0)
    service.run(nodes.nodes[0].close())
    service.rest()
    assert row_of(service, job_id)["lease_until"] > service.clock()


def test_an_agent_is_not_allowed_to_go_on_while_the_lease_cannot_be_extended(
    service: Service, nodes: TrainingNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.job()
    trainer_of(service, nodes, 0)
    agent = nodes.nodes[0].agent

    def away(*_: object) -> None:
        raise OperationalError("", None, Exception())

    monkeypatch.setattr(agent_launcher.job_leases, "extend", away)
    before = agent._lease.until
    service.until(lambda: any("could not be extended" in line for line in service.log.texts))
    assert agent._lease.until == before


@pytest.mark.parametrize("end_with_service", [False, True])
def test_a_start_waits_for_leases_of_agents_that_may_still_run(
    service: Service, nodes: TrainingNodes, end_with_service: bool
) -> None:
    job_id = service.job()
    trainer_of(service, nodes, 0)
    service.run(nodes.nodes[0].close())
    service.rest()
    nodes.end_with_service = end_with_service
    recover(service.parts, nodes)
    has_lapsed = row_of(service, job_id)["lease_until"] < service.clock()
    assert has_lapsed is end_with_service
