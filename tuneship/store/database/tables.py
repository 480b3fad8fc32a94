"""Every table. Rows hold the resources of the API, leases, digests and the outbox; never prompt or completion text.

A row type declares the columns of its table (`column_types.py`), so that a query for the table answers rows of that
type. Each resource row carries `client_id`, the tenant, and every query for a client filters by it.
"""

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypedDict, TypeVar

import sqlalchemy as sa

from tuneship.contract.datasets import DatasetStatus
from tuneship.contract.deployments import DeploymentStatus
from tuneship.contract.endpoints import EndpointStatus
from tuneship.contract.evaluations import EvaluationStatus
from tuneship.contract.jobs import JobStatus
from tuneship.contract.lines.dataset_lines import DatasetFormat
from tuneship.contract.openai.batches import BatchStatus
from tuneship.contract.releases import ReleaseStatus
from tuneship.store.database.column_types import (
    AS_JSON,
    FALSE,
    KEY,
    SERIAL,
    SMALL,
    ZERO,
    columns_of,
    one_of,
)

if TYPE_CHECKING:
    R_co = TypeVar("R_co", covariant=True)

    class TypedTable(sa.Table, Generic[R_co]):
        """A table whose rows have the type `R_co`; only the type checker knows it apart from `sa.Table`."""

else:
    TypedTable = sa.Table

R = TypeVar("R")

METADATA = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)


def _table(
    name: str, row: type[R], *more: sa.Index | sa.UniqueConstraint, **options: Any
) -> "TypedTable[R]":
    return TypedTable(name, METADATA, *columns_of(row), *more, **options)


class ApiKeyRow(TypedDict):
    """An API key; of its secret only the hash."""

    id: Annotated[str, KEY]
    client_id: str
    secret_hash: bytes
    scopes: list[str]
    label: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None
    # The person, as in the audit trail, whose sessions at the console this key stands for: nobody holds its secret.
    person: dict[str, str] | None


api_keys = _table("api_keys", ApiKeyRow)


class SignInLinkRow(TypedDict):
    """A link that signs one person in to the console; of its code only the digest."""

    digest: Annotated[bytes, KEY]
    client_id: str
    key_id: str
    # It was made for an address of this machine, and may be used from there only.
    is_local: bool
    expires_at: datetime


sign_in_links = _table("sign_in_links", SignInLinkRow)


class ConsoleSessionRow(TypedDict):
    """A person who has signed in to the console; of the cookie only the digest."""

    digest: Annotated[bytes, KEY]
    client_id: str
    key_id: str
    # As the person gave it; empty after a link.
    name: str
    # The session has no scope that changes anything.
    looks_only: bool
    # The last page or form; a stream does not count.
    used_at: datetime
    expires_at: datetime


console_sessions = _table(
    "console_sessions", ConsoleSessionRow, sa.Index("ix_console_sessions_expires_at", "expires_at")
)


class ResourceRow(TypedDict):
    """The columns that every resource has."""

    id: Annotated[str, KEY]
    client_id: str
    created_at: datetime
    updated_at: datetime
    tags: dict[str, str]


Resource = TypeVar("Resource", bound=ResourceRow)

RESOURCES: "list[TypedTable[Any]]" = []


def _resource(
    name: str, row: type[Resource], *more: sa.Index | sa.UniqueConstraint
) -> "TypedTable[Resource]":
    """Make the table of a resource, with the index that its list is read from."""
    listed = sa.Index(f"ix_{name}_client_id_created_at_id", "client_id", "created_at", "id")
    table = _table(name, row, *more, listed)
    RESOURCES.append(table)
    return table


class DatasetRow(ResourceRow):
    """A dataset."""

    name: str
    description: str
    format: DatasetFormat
    status: Annotated[str, one_of(DatasetStatus)]
    num_examples: int
    prompt_tokens: int
    response_tokens: int
    tokenizer: str
    source_datasets: list[str] | None
    blob: str
    sha256: str
    bytes: int
    # Counted by merge; null otherwise.
    duplicate_examples: int | None
    # See `hipaa.py`.
    came_safely: Annotated[bool, FALSE]
    error: dict[str, Any] | None
    # Null where there are none.
    suggestions: list[str] | None


datasets = _resource("datasets", DatasetRow, sa.Index("ix_datasets_status", "status"))


class BatchRow(ResourceRow):
    """Requests to be answered in the background, a few at a time.

    `completed` and `failed` together are those whose answers are stored.
    """

    endpoint: str
    input_file_id: str
    status: Annotated[str, one_of(BatchStatus)]
    # Who made it: each of its requests is answered as if that caller had sent it.
    caller: dict[str, Any]
    # Of everything that its requests have touched so far.
    security_settings: dict[str, Any]
    total: int
    completed: int
    failed: int
    prompt_tokens: int
    completion_tokens: int
    model: str | None
    errors: list[dict[str, Any]] | None
    output_file_id: str | None
    error_file_id: str | None
    expires_at: datetime
    in_progress_at: datetime | None
    finalizing_at: datetime | None
    completed_at: datetime | None
    failed_at: datetime | None
    expired_at: datetime | None
    cancelling_at: datetime | None
    cancelled_at: datetime | None


batches = _resource("batches", BatchRow, sa.Index("ix_batches_status", "status"))


class BatchFileRow(ResourceRow):
    """The requests of a batch, its answers or its errors, or a part of both while it runs."""

    name: str
    purpose: str
    # Null: somebody has uploaded it.
    batch_id: str | None
    # Of a part: how many requests were answered before its first one.
    position: int
    blob: str
    sha256: str
    bytes: int
    came_safely: bool
    security_settings: dict[str, Any]


batch_files = _resource(
    "batch_files",
    BatchFileRow,
    sa.Index("ix_batch_files_batch_id_position", "batch_id", "position"),
)


class EvalRow(ResourceRow):
    """The form of rows and the criteria of one of OpenAI's evals; its runs are evaluations."""

    name: str
    # As the request had them.
    data_source_config: dict[str, Any]
    testing_criteria: list[dict[str, Any]]


evals = _resource("evals", EvalRow)


class EvaluationRow(ResourceRow):
    """Answers of deployments to held-out examples; `answered` is the number of examples whose scores are stored."""

    name: str
    dataset_id: str
    dataset_sha256: str
    candidate: str
    # A deployment, an evaluation whose scores are used, or null.
    baseline: str | None
    candidate_model: str
    baseline_model: str | None
    settings: dict[str, Any]
    status: Annotated[str, one_of(EvaluationStatus)]
    # Who made it: each of its requests is answered as if that caller had sent it.
    caller: dict[str, Any]
    # Of its deployments, and of the evaluation whose scores are used.
    security_settings: dict[str, Any]
    # Null before the dataset was read: the number of selected examples, and the lines of those that have leaked.
    selected: int | None
    leaked_lines: list[int] | None
    leaks_checked: Annotated[bool, FALSE]
    answered: int
    # What was found so far; the final report once it has ended.
    report: dict[str, Any]
    verdict: str | None
    reason: str | None
    stopped_early: Annotated[bool, FALSE]
    used_before: int
    prompt_tokens: int
    completion_tokens: int
    error: dict[str, Any] | None
    started_at: datetime | None
    completed_at: datetime | None
    # The eval that it is a run of, and the run's own fields: its name, data source (no row, no prompt) and sampling.
    eval_id: str | None
    eval_run: dict[str, Any] | None


evaluations = _resource(
    "evaluations",
    EvaluationRow,
    sa.Index("ix_evaluations_status", "status"),
    sa.Index("ix_evaluations_eval_id", "eval_id"),
    sa.Index("ix_evaluations_client_id_dataset_sha256", "client_id", "dataset_sha256"),
)


class EvaluationScoresRow(TypedDict):
    """Scores of the next examples of an evaluation, in its random order. No text of a prompt or an answer."""

    evaluation_id: Annotated[str, KEY]
    # The number of examples before the first of these.
    position: Annotated[int, KEY]
    results: list[dict[str, Any]]


evaluation_scores = _table("evaluation_scores", EvaluationScoresRow)


class ReleaseRow(ResourceRow):
    """A release, folded from the lines of its records."""

    run_key: str
    kind: str
    status: Annotated[str, one_of(ReleaseStatus)]
    stage: str
    # The keys that announced it or sent its lines, with spaces between: none of their holders may promote it where
    # four eyes have to look.
    announced_by: str
    model_name: str | None
    endpoint_name: str | None
    endpoint_id: str | None
    job_id: str | None
    baseline_deployment_id: str | None
    candidate_deployment_id: str | None
    evaluation_id: str | None
    candidate_percentage: int | None
    outcome: str | None
    reason: str | None
    # The open question, with the answer that was given here.
    question: dict[str, Any] | None
    links: dict[str, str]
    ended_at: datetime | None
    # The number of the next line, by record.
    records: dict[str, int]
    line_count: int
    # Of its job, its deployments and its evaluation.
    security_settings: dict[str, Any]


releases = _resource(
    "releases",
    ReleaseRow,
    sa.UniqueConstraint("client_id", "run_key"),
    sa.Index(
        "ix_releases_client_id_status_created_at_id", "client_id", "status", "created_at", "id"
    ),
)


class ReleaseLineRow(TypedDict):
    """A stored line of a release's record; ids follow the order in which lines were stored."""

    id: Annotated[int, SERIAL]
    release_id: str
    record: str
    number: int
    at: datetime
    kind: str
    # Compressed JSON.
    line: bytes
    # A look in short, for charts.
    point: dict[str, Any] | None


release_lines = _table(
    "release_lines",
    ReleaseLineRow,
    sa.UniqueConstraint("release_id", "record", "number"),
    sa.Index("ix_release_lines_release_id_id", "release_id", "id"),
)


class JobRow(ResourceRow):
    """A fine-tuning job, with its lease."""

    base_model: str
    dataset_id: str
    validation_dataset_id: str | None
    fine_tuning_method: str
    model_name: str
    status: Annotated[str, one_of(JobStatus)]
    hyperparameters: dict[str, Any]
    # A fraction or a whole number, kept as it was sent.
    validation_frequency: Annotated[float, AS_JSON]
    compute_config: dict[str, Any]
    security_settings: dict[str, Any]
    # Null: no losses by row are asked for.
    comparison: dict[str, Any] | None
    fine_tuned_model: str | None
    started_at: datetime | None
    completed_at: datetime | None
    current_epoch: int
    total_epochs: int
    current_step: int
    total_steps: int
    training_loss: float | None
    validation_loss: float | None
    tokens_per_second: float | None
    seconds_per_step: float | None
    ends_learnt: float | None
    # The GPUs of its last attempt, as people know them.
    devices: list[str] | None
    error: dict[str, Any] | None
    owner: str | None
    attempt: int
    lease_until: datetime | None
    attempts_without_progress: int
    # The number of epochs whose end was sent as an event.
    epochs_told: Annotated[int, ZERO]
    # The attempt whose progress lines were stored last, and how many bytes of them were.
    progress_attempt: Annotated[int, ZERO]
    progress_offset: Annotated[int, ZERO]
    # The newest checkpoint in the store of files: `attempt`, `step`, and `objects`, digests by file name.
    checkpoint: dict[str, Any] | None


jobs = _resource(
    "jobs",
    JobRow,
    sa.Index("ix_jobs_status", "status"),
    sa.Index("ix_jobs_client_id_status_created_at_id", "client_id", "status", "created_at", "id"),
    sa.Index("ix_jobs_client_id_started_at", "client_id", "started_at"),
)


def _measured_index(*columns: str) -> sa.Index:
    # Only about one step in a hundred is an evaluation, and those are queried often: a partial index is small.
    return sa.Index(
        f"ix_job_metrics_{'_'.join(columns)}_measured",
        *columns,
        sqlite_where=sa.text("evaluated = 1"),
        postgresql_where=sa.text("evaluated"),
    )


class JobMetricsRow(TypedDict):
    """One step of a job."""

    job_id: Annotated[str, KEY]
    step: Annotated[int, KEY]
    training_loss: float
    validation_loss: float
    learning_rate: float
    epoch: float
    accuracy: float
    perplexity: float
    # False: accuracy, perplexity and validation loss repeat those of an earlier evaluation.
    evaluated: Annotated[bool, FALSE]
    # The newest entry of the log when the step was stored.
    log_id: Annotated[int, ZERO]


job_metrics = _table(
    "job_metrics",
    JobMetricsRow,
    _measured_index("job_id", "step"),
    _measured_index("job_id", "validation_loss", "step"),
)


class JobRowLossesRow(TypedDict):
    """The losses of a completed job's validation rows, beside the job's row, which is read far more often."""

    job_id: Annotated[str, KEY]
    losses: dict[str, Any]


job_row_losses = _table("job_row_losses", JobRowLossesRow)


class JobLogRow(TypedDict):
    """One entry of a job's log."""

    id: Annotated[int, SERIAL]
    job_id: str
    timestamp: datetime
    level: str
    message: str


job_logs = _table("job_logs", JobLogRow, sa.Index("ix_job_logs_job_id_id", "job_id", "id"))


class ModelRow(ResourceRow):
    """A tuned model; `sha256` holds the digest of each of its files."""

    base_model: str
    name: str
    # Null: it was trained elsewhere.
    job_id: str | None
    fine_tuning_method: str
    blob: str
    sha256: dict[str, str]
    # Null: not measured, or nothing was put behind its answers.
    ends_learnt: float | None
    appended_end: str | None
    # The size of its files, if it was trained elsewhere; 0 for others.
    imported_bytes: Annotated[int, ZERO]


models = _resource("models", ModelRow)


class DeploymentRow(ResourceRow):
    """A deployment; `generation` is its model configuration."""

    model_name: str
    deployment_name: str
    status: Annotated[str, one_of(DeploymentStatus)]
    compute_type: str
    instance_type: str
    region: str
    min_replicas: Annotated[int, {"default": 1}]
    max_replicas: Annotated[int, {"default": 1}]
    current_replicas: int
    # Null: no leader with agents has decided.
    wanted_replicas: int | None
    # Its delete was forced: every member ends its requests in flight.
    is_forced: Annotated[bool, {"default": False, **FALSE}]
    auto_scaling: bool
    vpc_config: dict[str, Any] | None
    generation: dict[str, Any]
    security_settings: dict[str, Any]
    error: dict[str, Any] | None
    health: Annotated[str, {"default": "unknown", "server_default": "unknown"}]
    implicit: Annotated[bool, {"default": False, **FALSE}]


deployments = _resource(
    "deployments",
    DeploymentRow,
    sa.Index("ix_deployments_status", "status"),
    sa.Index("ix_deployments_client_id_status", "client_id", "status"),
)


class DeploymentLogRow(TypedDict):
    """One line of a deployment's log."""

    id: Annotated[int, SERIAL]
    deployment_id: str
    timestamp: datetime
    level: str
    component: str
    request_id: str | None
    message: str


deployment_logs = _table(
    "deployment_logs",
    DeploymentLogRow,
    sa.Index("ix_deployment_logs_deployment_id_timestamp_id", "deployment_id", "timestamp", "id"),
)


class EndpointRow(ResourceRow):
    """A plain or canary endpoint with its split and the lease on it."""

    kind: str
    name: str
    members: list[dict[str, Any]]
    status: Annotated[str, one_of(EndpointStatus)]
    version: Annotated[int, {"default": 1}]
    lease_seconds: int | None
    lease_until: datetime | None
    lease_fallback: list[dict[str, Any]] | None
    # Whether a person may pause what the lease is for.
    pausable: Annotated[bool, FALSE]
    # What a person decided: `at`, `by`, `reason`, `ticket`.
    paused: dict[str, Any] | None
    reverted: dict[str, Any] | None
    # Goes into the draw of a routing key.
    rollout_id: str | None
    # Null: spread.
    large_keys: str | None


endpoints = _resource("endpoints", EndpointRow, sa.Index("ix_endpoints_lease_until", "lease_until"))


class EventRow(TypedDict):
    """An event of the outbox."""

    position: Annotated[int, SERIAL]
    id: Annotated[str, {"unique": True}]
    client_id: str
    type: str
    resource_id: str
    sequence: int
    created_at: datetime
    data: dict[str, Any]


events = _table(
    "events",
    EventRow,
    sa.UniqueConstraint("resource_id", "sequence"),
    sa.Index("ix_events_client_id_position", "client_id", "position"),
)


class WebhookRow(ResourceRow):
    """A webhook; its secrets are sealed, since they are needed to sign."""

    url: str
    description: str
    events: list[str]
    # The form of its deliveries.
    profile: Annotated[str, {"default": "tuneship", "server_default": "tuneship"}]
    active: bool
    secret: bytes
    # Signs too until `previous_until`.
    previous_secret: bytes | None
    previous_until: datetime | None
    failing_since: datetime | None
    disabled_reason: str | None


webhooks = _resource("webhooks", WebhookRow)


class DeliveryRow(TypedDict):
    """A delivery of one event to one webhook."""

    webhook_id: Annotated[str, KEY]
    event_id: Annotated[str, KEY]
    status: str
    attempts: int
    created_at: datetime
    updated_at: datetime
    # Null: no further attempt.
    next_attempt_at: datetime | None
    response_status: Annotated[int | None, SMALL]
    # One of our codes, never the receiver's text.
    failure: str | None


deliveries = _table(
    "deliveries",
    DeliveryRow,
    sa.Index("ix_deliveries_webhook_id_next_attempt_at", "webhook_id", "next_attempt_at"),
    sa.Index(
        "ix_deliveries_webhook_id_created_at_event_id", "webhook_id", "created_at", "event_id"
    ),
    sa.Index("ix_deliveries_event_id", "event_id"),
)


class TypedDeliveryRow(DeliveryRow):
    """A delivery with the type of its event."""

    type: str


class ObjectKeyRow(TypedDict):
    """The key of a dataset's, a job's or a model's sealed files. Deleting it makes the files unreadable."""

    # Kind and id, like the folder of its files.
    object_id: Annotated[str, KEY]
    client_id: str
    # By the tenant's key: `data_keys.py`.
    wrapped: bytes
    created_at: datetime


object_keys = _table("object_keys", ObjectKeyRow)


class IdempotencyRow(TypedDict):
    """A request with an idempotency key, and its answer once there is one."""

    client_id: Annotated[str, KEY]
    key: Annotated[str, KEY]
    fingerprint: str
    created_at: datetime
    lease_until: datetime
    status: Annotated[int | None, SMALL]
    location: str | None
    body: bytes | None
    # That works on it (`member_sessions.py`), 0: a service alone.
    member: int


idempotency = _table(
    "idempotency", IdempotencyRow, sa.Index("ix_idempotency_created_at", "created_at")
)


class _WindowKey(TypedDict):
    deployment_id: Annotated[str, KEY]
    endpoint_id: Annotated[str, KEY]
    # Seconds.
    width: Annotated[int, KEY]
    start: Annotated[int, KEY]


class MetricWindowRow(_WindowKey):
    """One stored window of one series."""

    # Whose counts they are: a member of a cluster has a number of its own, and 0 is of a service alone, or of all.
    shard: Annotated[int, {**KEY, **ZERO}]
    # Encoded by `metrics/columns.py`.
    window: bytes
    # An hour's 60 records without sketches; null: a member's.
    minutes: bytes | None


metric_windows = _table(
    "metric_windows",
    MetricWindowRow,
    sa.Index("ix_metric_windows_width_start", "width", "start"),
    # Finds the hours of members that are to be put together.
    sa.Index(
        "ix_metric_windows_shards",
        "width",
        "start",
        sqlite_where=sa.text("shard <> 0"),
        postgresql_where=sa.text("shard <> 0"),
    ),
    sqlite_with_rowid=False,  # rows are stored in the order in which they are read
)


class FinerWindowRow(_WindowKey):
    """The finer counts of a stored window: in a row of their own, since SQLite would give a longer row its own page."""

    shard: Annotated[int, KEY]
    counts: bytes


finer_windows = _table("finer_windows", FinerWindowRow, sqlite_with_rowid=False)


class SealedAuditRow(TypedDict):
    """The columns of an entry of the audit trail, with its seal."""

    at: datetime
    client_id: str
    key_id: str
    action: str
    resource_id: str | None
    status: Annotated[int, SMALL]
    address: str
    request_id: str
    prompt_tokens: int | None
    completion_tokens: int | None
    person: dict[str, str] | None
    mac: bytes


class AuditRow(SealedAuditRow):
    """One entry of the audit trail in its chain: its seal is over the row and the one before (`audit.py`)."""

    seq: Annotated[int, {**KEY, "autoincrement": False}]


audit = _table("audit", AuditRow, sa.Index("ix_audit_client_id_seq", "client_id", "seq"))


class UnlinkedAuditRow(SealedAuditRow):
    """One entry of the audit trail that is committed and not in its chain yet, sealed by itself. Postgres only."""

    position: Annotated[int, SERIAL]


unlinked_audit = _table("unlinked_audit", UnlinkedAuditRow)


class InstallationRow(TypedDict):
    """The one row that says which installation the database belongs to (`installation.py`)."""

    id: Annotated[str, KEY]
    starts: Annotated[int, ZERO]
    key_check: bytes | None
    newest_time: datetime | None
    # Null: no cluster has used it.
    cluster: str | None


installation = _table("installation", InstallationRow)


class LeaderRow(TypedDict):
    """The process that leads a cluster (`leader_lease.py`); a higher epoch ends the rights of all lower ones."""

    role: Annotated[str, KEY]
    owner: str
    epoch: int


leaders = _table("leaders", LeaderRow)


class LeaderLeaseRow(TypedDict):
    """Until when the leader of an epoch leads, by the database's clock.

    The lease has a table of its own, so that renewing it never waits for the leader's transactions, each of which locks
    the row with its epoch.
    """

    role: Annotated[str, KEY]
    epoch: int
    lease_until: datetime


leader_leases = _table("leader_leases", LeaderLeaseRow)


class RateWindowRow(TypedDict):
    """The requests of a client in one window of a minute that the members of a cluster have taken (`rate_windows.py`).

    Postgres writes no log of it: after a crash the windows begin again.
    """

    client_id: Annotated[str, KEY]
    kind: Annotated[str, KEY]
    # Epoch seconds.
    ends: Annotated[int, KEY]
    taken: int
    # Taken last.
    chunk: int


rate_windows = _table("rate_windows", RateWindowRow)


class AgentRow(TypedDict):
    """An agent with its replica, which the members of a cluster share (`agent_records.py`); only the leader writes it.

    The address is null until it is ready.
    """

    name: Annotated[str, KEY]
    base: str
    # Of the base model's files.
    digest: str
    number: int
    state: str
    host: str | None
    port: int | None
    # SHA-256.
    certificate: str | None


agents = _table("agents", AgentRow)


class FailedStartsRow(TypedDict):
    """How the starts of replicas of a base model have gone (`agent_records.py`); only the leader writes it."""

    base: Annotated[str, KEY]
    total: int
    in_a_row: int
    # Of the last one.
    error: str
    paused_until: datetime


failed_starts = _table("failed_starts", FailedStartsRow)


class MemberDemandRow(TypedDict):
    """The demand at a member of a cluster, by deployment (`member_demand.py`).

    Unlogged, like `rate_windows`: every member writes its row again within a second.
    """

    member: Annotated[str, KEY]
    written_at: datetime
    lapses_at: datetime
    demand: dict[str, Any]


member_demands = _table("member_demands", MemberDemandRow)


class MemberAgesRow(TypedDict):
    """The ages of the requests in flight at a member of a cluster, counted by deployment and endpoint.

    See `member_ages.py`. Unlogged, as `member_demands`.
    """

    member: Annotated[str, KEY]
    written_at: datetime
    ages: dict[str, dict[str, list[int]]]


member_ages = _table("member_ages", MemberAgesRow)
