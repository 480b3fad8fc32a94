"""The columns of each table as the type checker sees them: a row that was read is a dictionary of this type.

`tables.py` pairs each table with its type, so that a query for a table answers rows of the right one.
"""

from datetime import datetime
from typing import Any, TypedDict

from tuneship.contract.dataset_lines import DatasetFormat


class ResourceRow(TypedDict):
    """The columns that every resource has."""

    id: str
    client_id: str
    created_at: datetime
    updated_at: datetime
    tags: dict[str, str]


class ApiKeyRow(TypedDict):
    """An API key; of its secret only the hash."""

    id: str
    client_id: str
    secret_hash: bytes
    scopes: list[str]
    label: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class DatasetRow(ResourceRow):
    """A dataset."""

    name: str
    description: str
    format: DatasetFormat
    status: str
    num_examples: int
    prompt_tokens: int
    response_tokens: int
    tokenizer: str
    source_datasets: list[str] | None
    blob: str
    sha256: str
    bytes: int
    duplicate_examples: int | None
    came_safely: bool
    error: dict[str, Any] | None
    suggestions: list[str] | None


class BatchRow(ResourceRow):
    """A batch of requests; `completed` and `failed` together are those whose answers are stored."""

    endpoint: str
    input_file_id: str
    status: str
    caller: dict[str, Any]
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


class BatchFileRow(ResourceRow):
    """The requests of a batch, its answers or its errors, or a part of both while it runs."""

    name: str
    purpose: str
    batch_id: str | None
    position: int
    blob: str
    sha256: str
    bytes: int
    came_safely: bool
    security_settings: dict[str, Any]


class JobRow(ResourceRow):
    """A fine-tuning job, with its lease."""

    base_model: str
    dataset_id: str
    validation_dataset_id: str | None
    fine_tuning_method: str
    model_name: str
    status: str
    hyperparameters: dict[str, Any]
    validation_frequency: float
    compute_config: dict[str, Any]
    security_settings: dict[str, Any]
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
    devices: list[str] | None
    error: dict[str, Any] | None
    owner: str | None
    attempt: int
    lease_until: datetime | None
    attempts_without_progress: int
    epochs_told: int
    progress_attempt: int
    progress_offset: int
    checkpoint: dict[str, Any] | None


class JobMetricsRow(TypedDict):
    """One step of a job."""

    job_id: str
    step: int
    training_loss: float
    validation_loss: float
    learning_rate: float
    epoch: float
    accuracy: float
    perplexity: float
    evaluated: bool
    log_id: int


class JobRowLossesRow(TypedDict):
    """The losses of a job's validation rows, as its metrics show them."""

    job_id: str
    losses: dict[str, Any]


class JobLogRow(TypedDict):
    """One entry of a job's log."""

    id: int
    job_id: str
    timestamp: datetime
    level: str
    message: str


class ModelRow(ResourceRow):
    """A tuned model; `sha256` holds the digest of each of its files."""

    base_model: str
    name: str
    job_id: str | None
    """None: it was trained elsewhere."""
    fine_tuning_method: str
    blob: str
    sha256: dict[str, str]
    ends_learnt: float | None
    appended_end: str | None
    imported_bytes: int
    """The size of its files, if it was trained elsewhere; 0 for others."""


class DeploymentRow(ResourceRow):
    """A deployment; `generation` is its model configuration."""

    model_name: str
    deployment_name: str
    status: str
    compute_type: str
    instance_type: str
    region: str
    min_replicas: int
    max_replicas: int
    current_replicas: int
    wanted_replicas: int | None
    is_forced: bool
    auto_scaling: bool
    vpc_config: dict[str, Any] | None
    generation: dict[str, Any]
    security_settings: dict[str, Any]
    error: dict[str, Any] | None
    health: str
    implicit: bool


class DeploymentLogRow(TypedDict):
    """One line of a deployment's log."""

    id: int
    deployment_id: str
    timestamp: datetime
    level: str
    component: str
    request_id: str | None
    message: str


class EndpointRow(ResourceRow):
    """A plain or canary endpoint with its split and the lease on it."""

    kind: str
    name: str
    members: list[dict[str, Any]]
    status: str
    version: int
    lease_seconds: int | None
    lease_until: datetime | None
    lease_fallback: list[dict[str, Any]] | None
    rollout_id: str | None
    large_keys: str | None


class EventRow(TypedDict):
    """An event of the outbox."""

    position: int
    id: str
    client_id: str
    type: str
    resource_id: str
    sequence: int
    created_at: datetime
    data: dict[str, Any]


class WebhookRow(ResourceRow):
    """A webhook; its secrets are sealed."""

    url: str
    description: str
    events: list[str]
    profile: str
    active: bool
    secret: bytes
    previous_secret: bytes | None
    previous_until: datetime | None
    failing_since: datetime | None
    disabled_reason: str | None


class DeliveryRow(TypedDict):
    """A delivery of one event to one webhook."""

    webhook_id: str
    event_id: str
    status: str
    attempts: int
    created_at: datetime
    updated_at: datetime
    next_attempt_at: datetime | None
    response_status: int | None
    failure: str | None


class TypedDeliveryRow(DeliveryRow):
    """A delivery with the type of its event."""

    type: str


class ObjectKeyRow(TypedDict):
    """The sealed data key of a dataset, a job or a model."""

    object_id: str
    client_id: str
    wrapped: bytes
    created_at: datetime


class IdempotencyRow(TypedDict):
    """A request with an idempotency key, and its answer once there is one."""

    client_id: str
    key: str
    fingerprint: str
    created_at: datetime
    lease_until: datetime
    status: int | None
    location: str | None
    body: bytes | None
    member: int | None


class MetricWindowRow(TypedDict):
    """One stored window of one series."""

    deployment_id: str
    endpoint_id: str
    width: int
    start: int
    shard: int
    window: bytes
    minutes: bytes | None


class FinerWindowRow(TypedDict):
    """The newer counts of a stored window."""

    deployment_id: str
    endpoint_id: str
    width: int
    start: int
    shard: int
    counts: bytes


class ResourceCountRow(TypedDict):
    """The number of rows in one list of a tenant."""

    client_id: str
    resource: str
    number: int


class SealedAuditRow(TypedDict):
    """The columns of an entry of the audit trail, with its seal."""

    at: datetime
    client_id: str
    key_id: str
    action: str
    resource_id: str | None
    status: int
    address: str
    request_id: str
    prompt_tokens: int | None
    completion_tokens: int | None
    mac: bytes


class AuditRow(SealedAuditRow):
    """One entry of the audit trail in its chain."""

    seq: int


class UnlinkedAuditRow(SealedAuditRow):
    """One entry of the audit trail that is not in its chain yet."""

    position: int


class InstallationRow(TypedDict):
    """The installation that the database belongs to."""

    id: str
    starts: int
    key_check: bytes | None
    newest_time: datetime | None
    cluster: str | None


class LeaderRow(TypedDict):
    """The process that leads a cluster; a higher epoch ends the rights of all lower ones."""

    role: str
    owner: str
    epoch: int


class RateWindowRow(TypedDict):
    """The part of one window of a client that members have taken."""

    client_id: str
    kind: str
    ends: int
    taken: int
    chunk: int


class LeaderLeaseRow(TypedDict):
    """Until when the leader of an epoch leads, by the database's clock."""

    role: str
    epoch: int
    lease_until: datetime


class AgentRow(TypedDict):
    """An agent with its replica; the address is null until it is ready."""

    name: str
    base: str
    digest: str
    number: int
    state: str
    host: str | None
    port: int | None
    certificate: str | None


class FailedStartsRow(TypedDict):
    """How the starts of replicas of a base model have gone."""

    base: str
    total: int
    in_a_row: int
    error: str
    paused_until: datetime


class MemberAgesRow(TypedDict):
    """The ages of the requests in flight at a member of a cluster, counted by deployment and endpoint."""

    member: str
    written_at: datetime
    ages: dict[str, dict[str, list[int]]]


class MemberDemandRow(TypedDict):
    """The demand at a member of a cluster, by deployment."""

    member: str
    written_at: datetime
    lapses_at: datetime
    demand: dict[str, Any]
