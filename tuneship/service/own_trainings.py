"""Chooses by the settings where trainings run: as processes of the service, or by agents."""

from tuneship.runtime.launchers import Launcher
from tuneship.runtime.local_agents import LocalAgents
from tuneship.runtime.training_agents import TrainingAgents
from tuneship.runtime.worker_protocol import Runtime
from tuneship.service.common.clock_watch import utc_now
from tuneship.service.own_replicas import agent_authority, ray_jobs
from tuneship.settings import ServiceSettings


def training_agents(
    settings: ServiceSettings, secret: bytes, runtime: Runtime, *, isolates: bool
) -> TrainingAgents | None:
    """Make what starts the agents of trainings; None where trainings are processes of the service.

    `secret`: the master key. Raises `StartupError`.
    """
    if settings.agents == "none":
        return None
    launcher: Launcher
    if settings.agents == "ray":
        launcher = ray_jobs(settings)
    else:
        launcher = LocalAgents(runtime, settings.data_dir / "logs" / "agents.log")
    authority, word = agent_authority(secret)
    return TrainingAgents(
        launcher,
        authority,
        # Not the beginning of the names of replicas' agents, which a starting service ends.
        f"tuneship-trains-{word}-",
        utc_now,
        isolated=isolates,
        start_timeout_s=settings.agent_start_timeout_s,
    )
