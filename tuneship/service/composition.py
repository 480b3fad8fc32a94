"""Composes the background work of a service: each keeper gets what it uses, by name."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tuneship.agents.agent_replicas import ReplicaOrders
from tuneship.agents.agent_starter import AgentStarter
from tuneship.agents.training_agents import TrainingAgents
from tuneship.host.gpus import GpuLeases
from tuneship.host.thread_pools import Threads
from tuneship.processes.worker_protocol import Runtime
from tuneship.service.background.clock_watch import ClockWatch
from tuneship.service.background_requests.background_keeper import BackgroundKeeper
from tuneship.service.background_requests.pace import BackgroundPace, TakeSpare
from tuneship.service.batches.batch_kind import BatchKind
from tuneship.service.batches.stored_answers import BatchStore
from tuneship.service.cluster.agent_keeper import AgentKeeper
from tuneship.service.cluster.attached_agents import AttachedAgents
from tuneship.service.cluster.leadership import Leadership
from tuneship.service.cluster.shared_demand import SharedDemand
from tuneship.service.cluster.shared_replicas import SharedReplicas
from tuneship.service.context.context import Context
from tuneship.service.context.parts import Parts
from tuneship.service.datasets.processing import DatasetProcessing
from tuneship.service.deployments.deployment_keeper import DeploymentKeeper
from tuneship.service.deployments.replica_health import HealthChecks
from tuneship.service.deployments.scaling_decisions import ScalingDecisions
from tuneship.service.endpoints.lease_keeper import LeaseKeeper
from tuneship.service.evaluations.evaluation_kind import EvaluationKind
from tuneship.service.evaluations.evaluation_run import EvaluationStore
from tuneship.service.evaluations.held_out import HeldOutReader
from tuneship.service.jobs.agent_launcher import AgentTrainingLauncher
from tuneship.service.jobs.ends import JobEnds
from tuneship.service.jobs.launcher import TrainingLauncher
from tuneship.service.jobs.local_launcher import LocalTrainingLauncher
from tuneship.service.jobs.preparation import TrainingPreparation
from tuneship.service.jobs.training_keeper import TrainingKeeper
from tuneship.service.jobs.work_folders import WorkFolders
from tuneship.service.leader_work import LeaderWork
from tuneship.service.models.served_models import ModelLookup
from tuneship.service.retention_keeper import RetentionKeeper
from tuneship.service.supervisor import Supervisor
from tuneship.service.telemetry.record_keeper import RecordKeeper
from tuneship.store.database.database import Database


@dataclass(frozen=True)
class BackgroundParts:
    """The parts that only background work has."""

    # Starts processes.
    runtime: Runtime
    # The folder for attempts and checkpoints.
    work: Path
    # This process in lease rows.
    owner: str
    clock_watch: ClockWatch
    # The GPUs of this machine, which its trainings and vLLM servers share out among themselves.
    gpus: GpuLeases
    # Starts agents that train; None where trainings are processes of the service.
    training_agents: TrainingAgents | None


def supervisor_of(
    parts: Parts,
    background: BackgroundParts,
    take_spare: TakeSpare,
    leadership: Leadership,
    shared: SharedReplicas | None = None,
) -> Supervisor:
    """Compose the loops of a service. `shared`: the replicas are those of the whole cluster.

    `take_spare`: counts a batch's request against its tenant's limit, if there is enough left.
    """
    return Supervisor(
        database=parts.database,
        leadership=leadership,
        deployments=_deployments(parts, leadership, shared),
        records=RecordKeeper(
            database=parts.database,
            clock=parts.clock,
            recorder=parts.recorder,
            log=parts.deployment_log,
            in_flight=parts.in_flight,
            member_number=parts.member_number,
        ),
        make_leader_work=partial(_leader_work, parts, background, take_spare),
    )


def _deployments(
    parts: Parts, leadership: Leadership, shared: SharedReplicas | None
) -> DeploymentKeeper:
    models = ModelLookup(parts.catalogue, parts.keyring, parts.blobs)
    plan = scaling_decisions(parts, leadership, shared)
    return DeploymentKeeper(
        database=parts.database,
        replicas=parts.replicas,
        models=models,
        capabilities=parts.capabilities,
        in_flight=parts.in_flight,
        clock=parts.clock,
        drain_s=parts.timing.deployment_drain_s,
        plan=plan,
        health_checks=health_checks(parts, plan, leadership, shared),
        leadership=leadership,
        shared=shared,
    )


def scaling_decisions(
    parts: Parts, leadership: Leadership, shared: SharedReplicas | None = None
) -> ScalingDecisions:
    """Compose the decisions on the numbers of replicas."""
    return ScalingDecisions(
        settings=parts.settings,
        clock=parts.clock,
        in_flight=parts.in_flight,
        log=parts.deployment_log,
        leadership=leadership,
        shared=None if shared is None else shared.demand,
    )


def health_checks(
    parts: Parts,
    plan: ScalingDecisions,
    leadership: Leadership,
    shared: SharedReplicas | None = None,
) -> HealthChecks:
    """Compose the health checks of the replicas."""
    return HealthChecks(
        database=parts.database,
        replicas=parts.replicas,
        models=ModelLookup(parts.catalogue, parts.keyring, parts.blobs),
        in_flight=parts.in_flight,
        log=parts.deployment_log,
        clock=parts.clock,
        plan=plan,
        leadership=leadership,
        keeps_default=parts.settings.preload_base_models,
        shared=shared,
    )


def _leader_work(
    parts: Parts, background: BackgroundParts, take_spare: TakeSpare, database: Database
) -> LeaderWork:
    """Compose the work of one term of leadership, on the fenced database."""
    parts = replace(parts, database=database)
    threads = Threads("training", 4), Threads("checkpoints", 2), Threads("leases of trainings", 1)
    trainings = _trainings(parts, background, threads)
    # One for all kinds: together they give way to everybody who waits.
    pace = BackgroundPace(parts.in_flight, take_spare, parts.drain)
    return LeaderWork(
        database=database,
        trainings=trainings,
        datasets=DatasetProcessing(
            database=database,
            blobs=parts.blobs,
            keyring=parts.keyring,
            catalogue=parts.catalogue,
            clock=parts.clock,
        ),
        batches=BackgroundKeeper(
            database=database,
            clock=parts.clock,
            kind=BatchKind(
                BatchStore(parts.settings, database, parts.blobs, parts.keyring, parts.clock),
                partial(Context, parts),
            ),
            pace=pace,
        ),
        evaluations=BackgroundKeeper(
            database=database,
            clock=parts.clock,
            kind=EvaluationKind(
                EvaluationStore(database, parts.clock),
                HeldOutReader(database, parts.blobs, parts.keyring, parts.halted),
                partial(Context, parts),
            ),
            pace=pace,
        ),
        leases=LeaseKeeper(database=database, clock=parts.clock, held=trainings.held),
        retention=RetentionKeeper(
            database=database,
            blobs=parts.blobs,
            clock=parts.clock,
            clock_watch=background.clock_watch,
        ),
        training_threads=threads,
    )


def _trainings(
    parts: Parts, background: BackgroundParts, all_threads: tuple[Threads, Threads, Threads]
) -> TrainingKeeper:
    """`all_threads`: for files and rows, for uploads of checkpoints, and for leases of agents' trainings."""
    threads, uploads, lease_threads = all_threads
    settings, agents = parts.settings, background.training_agents
    folders = WorkFolders(
        blobs=parts.blobs,
        clock=parts.clock,
        gpus=None if settings.agents == "ray" else background.gpus,
        devices=settings.training_devices,
        work=background.work,
        threads=threads,
        uploads=uploads,
        is_portable=parts.blobs.is_remote or agents is not None,
    )
    launcher: TrainingLauncher
    if agents is None:
        launcher = LocalTrainingLauncher(
            runtime=background.runtime,
            folders=folders,
            clock=parts.clock,
            preloads=settings.preload_training,
        )
    else:
        launcher = AgentTrainingLauncher(
            agents=agents,
            size_of=lambda name: parts.instances.of_training(name).agent_size(settings),
            folders=folders,
            database=parts.database,
            clock=parts.clock,
            lease_threads=lease_threads,
        )
    ends = JobEnds(parts.database, parts.keyring, parts.notifier, parts.clock, parts.tracing)
    return TrainingKeeper(
        database=parts.database,
        notifier=parts.notifier,
        clock=parts.clock,
        preparation=TrainingPreparation(
            parts.database, parts.blobs, parts.keyring, parts.catalogue, parts.capabilities
        ),
        ends=ends,
        launcher=launcher,
        owner=background.owner,
        threads=threads,
        concurrent_jobs=settings.concurrent_jobs,
        cancel_patience=parts.timing.cancel_patience,
    )


def shared_replicas(
    parts: Parts, orders: ReplicaOrders, make_starter: Callable[[], AgentStarter], member: str
) -> SharedReplicas:
    """Compose a member's work with the replicas that all members of a cluster share.

    `orders`: of the groups in `parts`; `make_starter`: for one time of leading; `member`: this one's name.
    """
    place, notifier = (parts.catalogue, parts.replicas), parts.notifier
    demand = SharedDemand(parts.database, parts.in_flight, notifier, member, parts.clock)
    orders.on_need = demand.need

    def keeper(database: Database) -> AgentKeeper:
        return AgentKeeper(database, make_starter(), orders, place, notifier)

    return SharedReplicas(demand, AttachedAgents(parts.database, place, orders, notifier), keeper)
