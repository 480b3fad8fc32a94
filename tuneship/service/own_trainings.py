"""Chooses by the settings where trainings run: as processes of the service, or by agents."""

from tuneship.agents.training_agents import TrainingAgents
from tuneship.processes.worker_protocol import Runtime
from tuneship.service.background.clock_watch import utc_now
from tuneship.service.own_replicas import agent_authority, agent_launcher
from tuneship.settings import ServiceSettings


def training_agents(
    settings: ServiceSettings, secret: bytes, runtime: Runtime, *, isolates: bool
) -> TrainingAgents | None:
    """A function that makes the starter of trainings' agents; None if trainings are the service's processes.

    `secret`: the master key. Raises `StartupError`.
    """
    if settings.agents == "none":
        return None
    launcher = agent_launcher(settings, runtime)
    authority, fingerprint = agent_authority(secret)
    return TrainingAgents(
        launcher,
        authority,
        # Not the beginning of the names of replicas' agents, which a starting service ends.
        f"tuneship-trains-{fingerprint}-",
        utc_now,
        isolated=isolates,
        start_timeout_s=settings.agent_start_timeout_s,
    )
