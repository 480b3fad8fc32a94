"""A service places its replicas and trainings on the nodes of a real Ray cluster, and outlives the failure of nodes."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cluster.ray_cluster import RayNodes, descendants, install_ray, ray_nodes
from tests.support.faults.repeating import repeating
from tests.support.package_index import need_package_index
from tests.support.service.processes import (
    ROOT,
    Serve,
    ended_job,
    rows_file,
    running_deployment,
    start_job,
)
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.deployments import DeploymentCreate, DeploymentUpdate
from tuneship.contract.generation import Generate
from tuneship.service.catalogues.base_models import SHIPPED

pytestmark = [pytest.mark.soak, pytest.mark.long]
PROMPT = Generate(prompt="Which chapter is chronic eczema in?", max_tokens=8, temperature=0)
CLIENTS = 8
AGENT = "tuneship.agents.agent"
REPLICA = "tuneship.serving"
TRAINER = "tuneship.training"
EPOCHS, LONGER_THAN_THE_TEST = 30, 10_000
TYPES = """
instance_types:
  - {name: zone-b, compute_type: cpu, cpus: 3, node_labels: {zone: b}}
  - {name: zone-c, compute_type: cpu, cpus: 1, node_labels: {zone: c}}
"""
VLLM = str(ROOT / "tests" / "support" / "fakes" / "openai_server.py")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_package_index()
    return install_ray(tmp_path_factory.mktemp("ray") / "env")


@pytest.fixture(scope="module")
def cluster(command: Path) -> Iterator[RayNodes]:
    with ray_nodes(command) as nodes:
        for _ in range(2):
            nodes.add_node(cpus=2)
        yield nodes


def started(cluster: RayNodes, data: Path, **settings: Any) -> Serve:
    return Serve(
        data,
        **settings,
        agents="ray",
        ray_urls=cluster.url,
        ray_token_file=str(cluster.token_file),
        agent_command=f"{sys.executable} -m tuneship.agents.agent",
        agent_ports="0",
    )


def deployed(client: Client, replicas: int) -> str:
    made = client.deployments.create(
        DeploymentCreate(
            model_name="tuneship-tiny",
            deployment_name="on-ray",
            min_replicas=replicas,
            max_replicas=replicas,
        )
    ).id
    until(lambda: client.deployments.get(made).current_replicas == replicas)
    return made


def commands(node: "subprocess.Popen[bytes]") -> dict[int, list[str]]:
    """The command lines of a node's processes."""
    found = dict[int, list[str]]()
    for pid in descendants(node.pid):
        with suppress(OSError):  # the process has ended
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return found


def running(node: "subprocess.Popen[bytes]", module: str) -> list[int]:
    """Processes of a node that run a module of ours."""
    return [pid for pid, command in commands(node).items() if module in command]


def agents_of(cluster: RayNodes) -> set[int]:
    return {pid for node in cluster.nodes for pid in running(node, AGENT)}


def test_replicas_live_on_nodes_and_end_with_their_service(
    cluster: RayNodes, tmp_path: Path
) -> None:
    own = Serve(tmp_path / "own")
    expected = own.client().deployments.generate(deployed(own.client(), 1), PROMPT).completion
    own.stop()
    service = started(cluster, tmp_path / "data")
    try:
        client = service.client()
        deployment = deployed(client, 2)
        assert client.deployments.generate(deployment, PROMPT).completion == expected
        assert sum(len(running(node, REPLICA)) for node in cluster.nodes) == 2
        assert service.workers("tuneship.serving") == []
        # Ray sees a command line and the line that an agent says: neither a secret nor a text.
        (first, _) = jobs = cluster.jobs()
        logs = [cluster.get(f"/api/jobs/{one['submission_id']}/logs").text for one in jobs]
        key = (service.data_dir / "master.key").read_text().strip()
        for secret in (key, cluster.token, "eczema", str(service.data_dir)):
            assert secret not in f"{jobs} {logs}"
        assert "--trust" in first["entrypoint"]
        before = agents_of(cluster)
        service.kill()
        service.start()
        # Those of the killed one are ended.
        until(lambda: len(after := agents_of(cluster)) == 2 and not after & before)
        assert service.client().deployments.generate(deployment, PROMPT).completion == expected
        service.stop()
        until(lambda: not agents_of(cluster))
        assert "RUNNING" not in [one["status"] for one in cluster.jobs()]
    finally:
        service.kill()


def test_no_whole_answer_is_lost_when_a_replica_and_a_node_fail(
    cluster: RayNodes, tmp_path: Path
) -> None:
    service = started(cluster, tmp_path / "data")
    answers = Counter[str]()
    try:
        client = service.client()
        deployment = deployed(client, 2)
        expected = client.deployments.generate(deployment, PROMPT).completion

        def ask(client: Client) -> None:
            answers[client.deployments.generate(deployment, PROMPT).completion] += 1

        def more() -> None:
            before = answers.total()
            until(lambda: answers.total() > before + 2 * CLIENTS)

        # Every request is answered.
        with repeating(*[partial(ask, service.client()) for _ in range(CLIENTS)]):
            more()
            node = next(one for one in cluster.nodes if running(one, REPLICA))
            os.kill(running(node, REPLICA)[0], signal.SIGKILL)
            more()
            until(lambda: client.deployments.get(deployment).current_replicas == 2)
            cluster.kill_node(next(one for one in cluster.nodes if running(one, REPLICA)))
            more()
            (left,) = cluster.nodes
            until(lambda: len(running(left, REPLICA)) == 2)
        assert set(answers) == {expected}
    finally:
        service.stop()


def test_work_goes_on_while_the_head_is_away_and_starts_when_it_is_back(
    command: Path, tmp_path: Path
) -> None:
    with ray_nodes(command, keeps_state=True) as cluster:
        cluster.add_node(cpus=3)
        service = started(cluster, tmp_path / "data")
        answers = Counter[str]()
        try:
            client = service.client()
            deployment = deployed(client, 1)
            job_id = start_job(
                client, rows_file(tmp_path / "rows", 64), epochs=LONGER_THAN_THE_TEST
            )

            def ask(client: Client) -> None:
                answers[client.deployments.generate(deployment, PROMPT).completion] += 1

            def goes_on() -> None:
                """Both requests and the training do."""
                before, step = answers.total(), client.jobs.get(job_id).current_step
                until(lambda: answers.total() > before + 2 * CLIENTS)
                until(lambda: client.jobs.get(job_id).current_step > step)

            # Every request is answered.
            with repeating(*[partial(ask, service.client()) for _ in range(CLIENTS)]):
                goes_on()
                before = agents_of(cluster)
                cluster.kill_head()
                goes_on()
                cluster.start_head()
                back = time.monotonic()
                wanted = DeploymentUpdate(min_replicas=2, max_replicas=2)
                client.deployments.update(deployment, wanted)
                until(lambda: client.deployments.get(deployment).current_replicas == 2)
                print(f"a new replica {time.monotonic() - back:.1f} s after")  # noqa: T201
                goes_on()
            assert len(answers) == 1
            assert before < agents_of(cluster)  # those that ran still do, each with its one attempt
        finally:
            service.stop()
        until(lambda: not agents_of(cluster))


def test_a_training_goes_on_elsewhere_when_its_node_fails(
    cluster: RayNodes, tmp_path: Path
) -> None:
    cluster.add_node(cpus=2)
    rows = rows_file(tmp_path / "rows", 64)

    def trained(client: Client) -> str:
        return start_job(client, rows, epochs=EPOCHS, isolated=True)

    def curve(client: Client, job_id: str) -> dict[str, object]:
        job = ended_job(client, job_id)
        assert job.status == "completed", job.error
        return client.jobs.metrics(job_id).model_dump(exclude={"job_id", "created_at"})

    own = Serve(tmp_path / "own")
    expected = curve(own.client(), trained(own.client()))
    own.stop()
    service = started(cluster, tmp_path / "data")
    try:
        client = service.client()
        job_id = trained(client)
        until(lambda: client.jobs.get(job_id).current_step > 2 * 8)
        assert service.workers("tuneship.training") == []
        (node,) = [one for one in cluster.nodes if running(one, TRAINER)]
        cluster.kill_node(node)
        killed = time.monotonic()
        until(lambda: any(", from step " in one.message for one in client.jobs.logs(job_id).logs))
        print(f"goes on {time.monotonic() - killed:.1f} s after")  # noqa: T201
        assert curve(client, job_id) == expected

        # One that is killed with its service ends by itself, and its job goes on at the next start.
        job_id = trained(client)
        until(lambda: client.jobs.get(job_id).current_step > 2 * 8)
        service.kill()
        service.start()
        client = service.client()
        assert curve(client, job_id) == expected

        jobs = cluster.jobs()
        logs = [cluster.get(f"/api/jobs/{one['submission_id']}/logs").text for one in jobs]
        key = (service.data_dir / "master.key").read_text().strip()
        for secret in (key, cluster.token, "What is case", str(service.data_dir)):
            assert secret not in f"{jobs} {logs}"
    finally:
        service.stop()
    until(lambda: not agents_of(cluster))


def test_a_training_and_vllm_are_placed_where_instance_types_say(
    cluster: RayNodes, tmp_path: Path
) -> None:
    types, models = tmp_path / "types.yaml", tmp_path / "models.yaml"
    types.write_text(TYPES)
    (tmp_path / "base").symlink_to(SHIPPED / "tuneship-tiny", target_is_directory=True)
    entry = {
        "id": "big",
        "path": "base",
        "runtime": "vllm",
        "runtime_options": ["--seen", str(tmp_path / "seen.jsonl")],
        "instance_type": "zone-c",
    }
    models.write_text(yaml.safe_dump({"models": [entry]}))
    service = started(
        cluster,
        tmp_path / "data",
        instance_catalogue=str(types),
        model_catalogue=str(models),
        vllm_command=f"{sys.executable} {VLLM}",
    )
    try:
        client = service.client()
        rows = rows_file(tmp_path / "rows", 64)
        job_id = start_job(client, rows, epochs=LONGER_THAN_THE_TEST, instance_type="zone-b")
        # No node has that label yet, though others have room.
        until(lambda: "PENDING" in [one["status"] for one in cluster.jobs()])
        assert client.jobs.get(job_id).current_step == 0
        cluster.add_node(cpus=3, labels="zone=b")
        until(lambda: client.jobs.get(job_id).current_step > 0)
        assert [len(running(one, TRAINER)) for one in cluster.nodes[-1:]] == [1]
        cluster.add_node(cpus=1, labels="zone=c")
        deployment = running_deployment(client, "on-vllm", "big")
        answer = client.deployments.generate(deployment, PROMPT)
        assert answer.usage.completion_tokens == PROMPT.max_tokens
        served = [
            any(VLLM in command for command in commands(one).values()) for one in cluster.nodes
        ]
        assert served == [False] * (len(served) - 1) + [True]
    finally:
        service.stop()
    until(lambda: not agents_of(cluster))
