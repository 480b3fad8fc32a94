"""Chooses by the settings where trainings run: as processes of the service, or by agents."""

import hashlib

from tuneship.runtime.certificates import PURPOSE, AgentAuthority
from tuneship.runtime.training_agents import TrainingAgents
from tuneship.runtime.worker_protocol import Runtime
from tuneship.security.master_key import derived_secret
from tuneship.service.common.clock_watch import utc_now
from tuneship.service.own_replicas import agent_launcher
from tuneship.settings import ServiceSettings


def training_agents(
    settings: ServiceSettings, secret: bytes, runtime: Runtime, *, isolates: bool
) -> TrainingAgents | None:
    """Make what starts the agents of trainings; None where trainings are processes of the service.

    `secret`: the master key. Raises `StartupError`.
    """
    if settings.agents == "none":
        return None
    launcher = agent_launcher(settings, runtime)
    agent_secret = derived_secret(secret, PURPOSE)
    # Not the beginning of the names of replicas' agents, which a starting service ends.
    prefix = f"tuneship-trains-{hashlib.sha256(agent_secret).hexdigest()[:12]}-"
    return TrainingAgents(
        launcher,
        AgentAuthority(agent_secret),
        prefix,
        utc_now,
        isolated=isolates,
        start_timeout_s=settings.agent_start_timeout_s,
    )
