"""Chooses by the settings where the replicas of the built-in engine run: as processes of the service, or by agents."""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tuneship.agents.agent_starter import AgentOptions, AgentStarter, BaseOptions
from tuneship.agents.launchers import AgentSize, CannotLaunch, Launcher, LauncherAway
from tuneship.agents.local_agents import LocalAgents
from tuneship.agents.ray_jobs import AgentJob, RayCluster, RayJobs
from tuneship.host.machine import cache_share
from tuneship.host.operator_files import secret_in, trust_in
from tuneship.host.startup import StartupError
from tuneship.processes.worker_protocol import Runtime
from tuneship.replicas.engine_kinds import VLLM_ENGINE, VllmServer
from tuneship.replicas.local_replicas import process_starter
from tuneship.replicas.replica import StartReplica
from tuneship.security.master_key import derived_secret
from tuneship.service.access.isolation import worker_folder
from tuneship.service.background.clock_watch import utc_now
from tuneship.service.catalogues.base_models import Catalogue, CataloguedModel
from tuneship.service.catalogues.instance_types import InstanceCatalogue
from tuneship.settings import AgentSettings, ServiceSettings

if TYPE_CHECKING:
    from tuneship.agents.certificates import AgentAuthority

logger = logging.getLogger(__name__)

Catalogues = tuple[Catalogue, InstanceCatalogue]

# An agent that no member of a cluster is connected to has no row any more, or soon would have a successor.
ALONE_IN_CLUSTER_S = 45.0


def replica_starter(
    settings: ServiceSettings,
    secret: bytes,
    runtime: Runtime,
    catalogues: Catalogues,
    *,
    isolates: bool,
) -> StartReplica:
    """Make the function that starts replicas as the settings say. Raises `StartupError`. `secret`: the master key."""
    if settings.agents == "none":

        def cache_bytes(base: Path) -> int:
            return settings.replica_cache_bytes or cache_share(base, settings.replica_processes)

        models = worker_folder(settings, "models")
        weights_of = catalogues[0].weights_of
        return process_starter(runtime, cache_bytes, models, weights=weights_of)
    make_starter = agent_starters(settings, secret, runtime, catalogues, utc_now, isolates=isolates)
    return make_starter().start_replica


def agent_starters(
    settings: ServiceSettings,
    secret: bytes,
    runtime: Runtime,
    catalogues: Catalogues,
    clock: Callable[[], datetime],
    *,
    isolates: bool,
) -> Callable[[], AgentStarter]:
    """A function that makes a starter of agents for each term of leadership. Raises `StartupError`."""
    is_shared = settings.cluster is not None
    launcher = agent_launcher(settings, runtime, outlive_service=is_shared)
    options = AgentOptions(
        isolated=isolates,
        cache_bytes=settings.replica_cache_bytes,
        processes=settings.replica_processes,
        of_base=partial(base_options, settings, catalogues),
        start_timeout_s=settings.agent_start_timeout_s,
        alone_s=ALONE_IN_CLUSTER_S if is_shared else None,
    )
    authority, fingerprint = agent_authority(secret)
    return partial(AgentStarter, launcher, authority, f"tuneship-{fingerprint}", options, clock)


def base_options(settings: ServiceSettings, catalogues: Catalogues, path: Path) -> BaseOptions:
    """Read the settings for the replicas of a base model from its entry. Raises `CatalogueFault`."""
    catalogue, instances = catalogues
    base = catalogue.at(path)
    size = instances.of_replicas(base).agent_size(settings)
    if base is None:
        return BaseOptions(size=size)
    vllm = vllm_server(settings, base) if base.engine is VLLM_ENGINE else None
    return BaseOptions(base.weights, vllm, size)


def vllm_server(settings: ServiceSettings, base: CataloguedModel) -> VllmServer:
    """Make the command that serves a base model of vLLM."""
    start_timeout_s = settings.vllm_start_timeout_s
    return VllmServer(settings.vllm_command, base.runtime_options, start_timeout_s)


def agent_authority(secret: bytes) -> tuple["AgentAuthority", str]:
    """The authority that all agents of a service trust, and a fingerprint that distinguishes its agents.

    Several installations may use one cluster of nodes. Derived from the master key, both are the same after a restart.
    """
    from tuneship.agents.certificates import (  # noqa: PLC0415 - loads X.509, for agents alone
        PURPOSE,
        AgentAuthority,
    )

    agent_secret = derived_secret(secret, PURPOSE)
    return AgentAuthority(agent_secret), hashlib.sha256(agent_secret).hexdigest()[:12]


def agent_launcher(
    settings: ServiceSettings, runtime: Runtime, *, outlive_service: bool = False
) -> Launcher:
    """Make the launcher of agents that the settings ask for. Raises `StartupError`."""
    if settings.agents == "ray":
        return ray_jobs(settings)
    log = settings.data_dir / "logs" / "agents.log"
    return LocalAgents(runtime, log, outlive_service=outlive_service)


def ray_jobs(settings: AgentSettings) -> RayJobs:
    """Make the launcher for the clusters of the settings. Raises `StartupError`."""
    if settings.ray_token_file is None:
        raise StartupError("TUNESHIP_RAY_TOKEN_FILE is missing")
    token = secret_in(settings.ray_token_file, "TUNESHIP_RAY_TOKEN_FILE")
    verify = trust_in(settings.ray_ca_file, "TUNESHIP_RAY_CA_FILE")
    clusters = [RayCluster(url.rstrip("/"), token, verify) for url in settings.ray_urls]
    size = AgentSize(settings.agent_cpus, settings.agent_gpus, settings.agent_memory_bytes)
    return RayJobs(clusters, AgentJob(settings.agent_command, settings.agent_ports, size))


def check_ray(settings: AgentSettings) -> None:
    """Refuse a Ray cluster that does not let this service in, or that lets everybody in. Raises `StartupError`."""
    if settings.agents != "ray":
        return
    try:
        asyncio.run(ray_jobs(settings).check())
    except LauncherAway as error:  # what needs no new replica works meanwhile
        logger.warning("no agent can be started now on %s: %s", settings.ray_urls[0], error)
    except CannotLaunch as error:
        text = f"agents cannot be started on {settings.ray_urls[0]}: {error}"
        raise StartupError(text) from None
