"""Agents are jobs of a Ray cluster: submitted, looked at, stopped and deleted over its REST API."""

import asyncio
import shlex
import ssl
from collections.abc import Iterator

import pytest

from tests.support.fakes.ray_dashboard import TOKEN, PlayedDashboard, ray_dashboard
from tests.support.waiting import free_port
from tuneship.agents.launchers import AgentSize, AgentState, CannotLaunch, LauncherAway
from tuneship.agents.ray_jobs import AgentJob, RayCluster, RayJobs

JOB = AgentJob(("/opt/a b/python", "-m", "agent"), "20000-20999", AgentSize(2.0, 1.0, 1 << 30))
TRUST = ("--trust", "c2lnbmVk")


@pytest.fixture
def dashboard() -> Iterator[PlayedDashboard]:
    with ray_dashboard() as played:
        yield played


def jobs_of(*urls: str, token: str = TOKEN) -> RayJobs:
    context = ssl.create_default_context()
    return RayJobs([RayCluster(url, token, context) for url in urls], JOB)


def test_an_agent_is_a_job_with_what_it_needs(dashboard: PlayedDashboard) -> None:
    asyncio.run(jobs_of(dashboard.url).start("n", TRUST))
    body = dashboard.jobs["n"]["body"]
    assert (body["entrypoint_num_cpus"], body["entrypoint_num_gpus"]) == (2.0, 1.0)
    assert body["entrypoint_memory"] == 1 << 30
    command = [*JOB.command, *TRUST, "--ports", JOB.ports, "--towards", "$RAY_ADDRESS"]
    assert shlex.split(body["entrypoint"]) == ["exec", *command]
    assert TOKEN not in str(body)
    assert "entrypoint_label_selector" not in body


def test_a_start_may_ask_for_more_and_for_nodes_with_labels(dashboard: PlayedDashboard) -> None:
    labels = {"ray.io/accelerator-type": "H100"}
    size = AgentSize(cpus=8, gpus=4, memory_bytes=0, labels=labels)
    asyncio.run(jobs_of(dashboard.url).start("n", TRUST, size))
    body = dashboard.jobs["n"]["body"]
    assert (body["entrypoint_num_cpus"], body["entrypoint_num_gpus"]) == (8, 4)
    assert "entrypoint_memory" not in body
    assert body["entrypoint_label_selector"] == labels


def test_its_state_is_read_until_it_ends(dashboard: PlayedDashboard) -> None:
    jobs = jobs_of(dashboard.url)
    asyncio.run(jobs.start("n", TRUST))
    assert asyncio.run(jobs.state("n")) == AgentState()
    dashboard.jobs["n"] |= {"status": "RUNNING", "logs": "ready"}
    assert asyncio.run(jobs.state("n")) == AgentState("ready")
    dashboard.jobs["n"] |= {"status": "FAILED"}
    assert asyncio.run(jobs.state("n")) == AgentState(has_ended=True)
    del dashboard.jobs["n"]
    assert asyncio.run(jobs.state("n")) == AgentState(has_ended=True)


@pytest.mark.parametrize("status", ["PENDING", "RUNNING", "SUCCEEDED"])
def test_the_entry_of_an_ended_agent_is_deleted_at_a_later_start(
    dashboard: PlayedDashboard, status: str
) -> None:
    jobs = jobs_of(dashboard.url)
    asyncio.run(jobs.begin("mine-"))
    for name in ("mine-1", "mine-2", "others-1"):
        asyncio.run(jobs.start(name, TRUST))
    dashboard.jobs["mine-1"]["status"] = dashboard.jobs["others-1"]["status"] = status
    asyncio.run(jobs.end("mine-1"))
    assert dashboard.jobs["mine-1"]["status"] in ("STOPPED", "SUCCEEDED")
    asyncio.run(jobs.start("mine-3", TRUST))
    assert list(dashboard.jobs) == ["mine-2", "others-1", "mine-3"]
    asyncio.run(jobs.end("mine-1"))


def test_those_of_an_earlier_service_are_ended_on_every_cluster(dashboard: PlayedDashboard) -> None:
    with ray_dashboard() as other:
        for one in (dashboard, other):
            for name in ("mine-1", "mine-2", "others-1"):
                asyncio.run(jobs_of(one.url).start(name, TRUST))
        asyncio.run(jobs_of(dashboard.url, other.url).begin("mine-"))
        for one in (dashboard, other):
            states = {name: job["status"] for name, job in one.jobs.items()}
            assert states == {"mine-1": "STOPPED", "mine-2": "STOPPED", "others-1": "PENDING"}


def test_an_old_cluster_that_is_gone_hinders_no_start(
    dashboard: PlayedDashboard, caplog: pytest.LogCaptureFixture
) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    asyncio.run(jobs_of(dashboard.url).start("mine-1", TRUST))
    asyncio.run(jobs_of(dashboard.url, gone).begin("mine-"))
    assert dashboard.jobs["mine-1"]["status"] == "STOPPED"
    assert gone in caplog.text
    with pytest.raises(LauncherAway):
        asyncio.run(jobs_of(gone, dashboard.url).begin("mine-"))


def test_those_that_a_later_leader_keeps_go_on(dashboard: PlayedDashboard) -> None:
    for name in ("mine-1", "mine-2"):
        asyncio.run(jobs_of(dashboard.url).start(name, TRUST))
    asyncio.run(jobs_of(dashboard.url).begin("mine-", {"mine-2"}))
    states = {name: job["status"] for name, job in dashboard.jobs.items()}
    assert states == {"mine-1": "STOPPED", "mine-2": "PENDING"}


def test_a_cluster_must_require_its_token(dashboard: PlayedDashboard) -> None:
    asyncio.run(jobs_of(dashboard.url).check())
    with pytest.raises(CannotLaunch, match="TUNESHIP_RAY_TOKEN_FILE"):
        asyncio.run(jobs_of(dashboard.url, token="wrong").check())
    dashboard.lets_everybody_in = True
    with pytest.raises(CannotLaunch, match="RAY_AUTH_MODE=token"):
        asyncio.run(jobs_of(dashboard.url).begin("mine-"))


def test_a_cluster_that_is_away_or_another_program_is_named(dashboard: PlayedDashboard) -> None:
    with pytest.raises(LauncherAway, match="ConnectError"):
        asyncio.run(jobs_of(f"http://127.0.0.1:{free_port()}").check())
    dashboard.is_another_program = True
    with pytest.raises(CannotLaunch, match="not its Jobs API"):
        asyncio.run(jobs_of(dashboard.url).check())
    dashboard.is_another_program = False
    asyncio.run(jobs_of(dashboard.url).start("n", TRUST))
    with pytest.raises(CannotLaunch, match="500"):
        asyncio.run(jobs_of(dashboard.url).start("n", TRUST))
