"""Every table. Rows hold the resources of the API, leases, digests and the outbox; never prompt or completion text.

Each resource row carries `client_id`, the tenant, and every query for a client filters by it. The types of the rows:
`row_types.py`.
"""

from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from tuneship.store.database.column_types import METADATA, TypedTable
from tuneship.store.database.column_types import json_column as _json
from tuneship.store.database.column_types import moment as _moment
from tuneship.store.database.column_types import number as _number
from tuneship.store.database.column_types import text as _text
from tuneship.store.database.column_types import whole as _whole

if TYPE_CHECKING:
    from tuneship.store.database.row_types import (
        AgentRow,
        ApiKeyRow,
        AuditRow,
        BatchFileRow,
        BatchRow,
        DatasetRow,
        DeliveryRow,
        DeploymentLogRow,
        DeploymentRow,
        EndpointRow,
        EventRow,
        FailedStartsRow,
        FinerWindowRow,
        IdempotencyRow,
        InstallationRow,
        JobLogRow,
        JobMetricsRow,
        JobRow,
        JobRowLossesRow,
        LeaderLeaseRow,
        LeaderRow,
        MemberAgesRow,
        MemberDemandRow,
        MetricWindowRow,
        ModelRow,
        ObjectKeyRow,
        RateWindowRow,
        ResourceCountRow,
        UnlinkedAuditRow,
        WebhookRow,
    )


def _resource(
    name: str, *columns: "sa.Column[Any] | sa.Index | sa.UniqueConstraint"
) -> "TypedTable[Any]":
    """Declare the table of a resource: id, tenant, times and tags, then its own columns."""
    return TypedTable(
        name,
        METADATA,
        _text("id", primary_key=True),
        _text("client_id"),
        _moment("created_at"),
        _moment("updated_at"),
        _json("tags"),
        *columns,
        sa.Index(f"ix_{name}_client_id_created_at_id", "client_id", "created_at", "id"),
    )


api_keys: "TypedTable[ApiKeyRow]" = TypedTable(
    "api_keys",
    METADATA,
    _text("id", primary_key=True),
    _text("client_id"),
    sa.Column("secret_hash", sa.LargeBinary, nullable=False),
    _json("scopes"),
    _text("label"),
    _moment("created_at"),
    _moment("expires_at", optional=True),
    _moment("revoked_at", optional=True),
    _moment("last_used_at", optional=True),
)

datasets: "TypedTable[DatasetRow]" = _resource(
    "datasets",
    _text("name"),
    _text("description"),
    _text("format"),
    _text("status"),
    _whole("num_examples"),
    _whole("prompt_tokens"),
    _whole("response_tokens"),
    _text("tokenizer"),
    _json("source_datasets", optional=True),
    _text("blob"),
    _text("sha256"),
    _whole("bytes"),
    sa.Column("duplicate_examples", sa.BigInteger),  # counted by merge; null otherwise
    sa.Column("came_safely", sa.Boolean, nullable=False, server_default=sa.false()),  # `hipaa.py`
    _json("error", optional=True),
    _json("suggestions", optional=True),  # null where there are none
    sa.Index("ix_datasets_status", "status"),
)

# Requests to be answered in the background, a few at a time, and the files that they come from and go to.
batches: "TypedTable[BatchRow]" = _resource(
    "batches",
    _text("endpoint"),
    _text("input_file_id"),
    _text("status"),
    _json("caller"),  # who made it: each of its requests is answered as if that caller had sent it
    _json("security_settings"),  # of what its requests have touched so far
    _whole("total"),
    _whole("completed"),
    _whole("failed"),
    _whole("prompt_tokens"),
    _whole("completion_tokens"),
    sa.Column("model", sa.Text),
    _json("errors", optional=True),
    sa.Column("output_file_id", sa.Text),
    sa.Column("error_file_id", sa.Text),
    _moment("expires_at"),
    *(
        _moment(f"{state}_at", optional=True)
        for state in (
            *("in_progress", "finalizing", "completed", "failed"),
            *("expired", "cancelling", "cancelled"),
        )
    ),
    sa.Index("ix_batches_status", "status"),
)

batch_files: "TypedTable[BatchFileRow]" = _resource(
    "batch_files",
    _text("name"),
    _text("purpose"),
    sa.Column("batch_id", sa.Text),  # null: somebody has uploaded it
    _whole("position"),  # of a part: how many requests were answered before its first one
    _text("blob"),
    _text("sha256"),
    _whole("bytes"),
    sa.Column("came_safely", sa.Boolean, nullable=False),
    _json("security_settings"),
    sa.Index("ix_batch_files_batch_id_position", "batch_id", "position"),
)

jobs: "TypedTable[JobRow]" = _resource(
    "jobs",
    _text("base_model"),
    _text("dataset_id"),
    sa.Column("validation_dataset_id", sa.Text),
    _text("fine_tuning_method"),
    _text("model_name"),
    _text("status"),
    _json("hyperparameters"),
    _json("validation_frequency"),  # a fraction or a whole number, kept as it was sent
    _json("compute_config"),
    _json("security_settings"),
    _json("comparison", optional=True),  # null: no losses by row are asked for
    sa.Column("fine_tuned_model", sa.Text),
    _moment("started_at", optional=True),
    _moment("completed_at", optional=True),
    _whole("current_epoch"),
    _whole("total_epochs"),
    _whole("current_step"),
    _whole("total_steps"),
    sa.Column("training_loss", sa.Float),
    sa.Column("validation_loss", sa.Float),
    sa.Column("tokens_per_second", sa.Float),
    sa.Column("seconds_per_step", sa.Float),
    sa.Column("ends_learnt", sa.Float),
    _json("devices", optional=True),  # the GPUs of its last attempt, as people know them
    _json("error", optional=True),
    sa.Column("owner", sa.Text),
    _whole("attempt"),
    _moment("lease_until", optional=True),
    _whole("attempts_without_progress"),
    _whole("epochs_told", server_default="0"),  # number of epochs whose end was sent as an event
    _whole(
        "progress_attempt", server_default="0"
    ),  # the attempt whose progress lines were stored last
    _whole("progress_offset", server_default="0"),  # how many bytes of them were stored
    # The newest checkpoint in the store of files: `attempt`, `step`, and `objects`, digests by file name.
    _json("checkpoint", optional=True),
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


job_metrics: "TypedTable[JobMetricsRow]" = TypedTable(
    "job_metrics",
    METADATA,
    _text("job_id", primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True),
    _number("training_loss"),
    _number("validation_loss"),
    _number("learning_rate"),
    _number("epoch"),
    _number("accuracy"),
    _number("perplexity"),
    # False: accuracy, perplexity and validation loss repeat those of an earlier evaluation.
    sa.Column("evaluated", sa.Boolean, nullable=False, server_default=sa.false()),
    _whole("log_id", server_default="0"),  # the newest entry of the log when the step was stored
    _measured_index("job_id", "step"),
    _measured_index("job_id", "validation_loss", "step"),
)

# The losses of the validation rows of a completed job, beside its row, which is read far more often.
job_row_losses: "TypedTable[JobRowLossesRow]" = TypedTable(
    "job_row_losses", METADATA, _text("job_id", primary_key=True), _json("losses")
)

job_logs: "TypedTable[JobLogRow]" = TypedTable(
    "job_logs",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    _text("job_id"),
    _moment("timestamp"),
    _text("level"),
    _text("message"),
    sa.Index("ix_job_logs_job_id_id", "job_id", "id"),
)

models: "TypedTable[ModelRow]" = _resource(
    "models",
    _text("base_model"),
    _text("name"),
    # None: it was trained elsewhere.
    sa.Column("job_id", sa.Text),
    _text("fine_tuning_method"),
    _text("blob"),
    _json("sha256"),
    # Null: not measured, or nothing was put behind its answers.
    sa.Column("ends_learnt", sa.Float),
    sa.Column("appended_end", sa.Text),
    # Of a model that was trained elsewhere; 0 for others.
    _whole("imported_bytes", server_default="0"),
)

deployments: "TypedTable[DeploymentRow]" = _resource(
    "deployments",
    _text("model_name"),
    _text("deployment_name"),
    _text("status"),
    _text("compute_type"),
    _text("instance_type"),
    _text("region"),
    _whole("min_replicas", 1),
    _whole("max_replicas", 1),
    _whole("current_replicas"),
    sa.Column("wanted_replicas", sa.BigInteger),  # null: no leader with agents has decided
    # Its delete was forced: every member ends its requests in flight.
    sa.Column("is_forced", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    sa.Column("auto_scaling", sa.Boolean, nullable=False),
    _json("vpc_config", optional=True),
    _json("generation"),
    _json("security_settings"),
    _json("error", optional=True),
    _text("health", default="unknown", server_default="unknown"),
    sa.Column("implicit", sa.Boolean, nullable=False, default=False, server_default=sa.false()),
    sa.Index("ix_deployments_status", "status"),
    sa.Index("ix_deployments_client_id_status", "client_id", "status"),
)

deployment_logs: "TypedTable[DeploymentLogRow]" = TypedTable(
    "deployment_logs",
    METADATA,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    _text("deployment_id"),
    _moment("timestamp"),
    _text("level"),
    _text("component"),
    sa.Column("request_id", sa.Text),
    _text("message"),
    sa.Index("ix_deployment_logs_deployment_id_timestamp_id", "deployment_id", "timestamp", "id"),
)

endpoints: "TypedTable[EndpointRow]" = _resource(
    "endpoints",
    _text("kind"),
    _text("name"),
    _json("members"),
    _text("status"),
    _whole("version", 1),
    sa.Column("lease_seconds", sa.BigInteger),
    _moment("lease_until", optional=True),
    _json("lease_fallback", optional=True),
    sa.Column("rollout_id", sa.Text),  # goes into the draw of a routing key
    sa.Column("large_keys", sa.Text),  # null: spread
    sa.Index("ix_endpoints_lease_until", "lease_until"),
)

events: "TypedTable[EventRow]" = TypedTable(
    "events",
    METADATA,
    sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    _text("id", unique=True),
    _text("client_id"),
    _text("type"),
    _text("resource_id"),
    _whole("sequence"),
    _moment("created_at"),
    _json("data"),
    sa.UniqueConstraint("resource_id", "sequence"),
    sa.Index("ix_events_client_id_position", "client_id", "position"),
)

webhooks: "TypedTable[WebhookRow]" = _resource(
    "webhooks",
    _text("url"),
    _text("description"),
    _json("events"),
    _text("profile", default="tuneship", server_default="tuneship"),  # the form of its deliveries
    sa.Column("active", sa.Boolean, nullable=False),
    sa.Column("secret", sa.LargeBinary, nullable=False),  # encrypted: it is needed to sign
    sa.Column("previous_secret", sa.LargeBinary),  # signs too until `previous_until`
    _moment("previous_until", optional=True),
    _moment("failing_since", optional=True),
    sa.Column("disabled_reason", sa.Text),
)

deliveries: "TypedTable[DeliveryRow]" = TypedTable(
    "deliveries",
    METADATA,
    _text("webhook_id", primary_key=True),
    _text("event_id", primary_key=True),
    _text("status"),
    _whole("attempts"),
    _moment("created_at"),
    _moment("updated_at"),
    _moment("next_attempt_at", optional=True),  # null: no further attempt
    sa.Column("response_status", sa.Integer),
    sa.Column("failure", sa.Text),  # one of our codes, never the receiver's text
    sa.Index("ix_deliveries_webhook_id_next_attempt_at", "webhook_id", "next_attempt_at"),
    sa.Index(
        "ix_deliveries_webhook_id_created_at_event_id", "webhook_id", "created_at", "event_id"
    ),
    sa.Index("ix_deliveries_event_id", "event_id"),
)

# The keys of sealed files. Deleting a key makes its files unreadable.
object_keys: "TypedTable[ObjectKeyRow]" = TypedTable(
    "object_keys",
    METADATA,
    _text("object_id", primary_key=True),  # kind and id, like the folder of its files
    _text("client_id"),
    sa.Column("wrapped", sa.LargeBinary, nullable=False),  # by the tenant's key: `data_keys.py`
    _moment("created_at"),
)

idempotency: "TypedTable[IdempotencyRow]" = TypedTable(
    "idempotency",
    METADATA,
    _text("client_id", primary_key=True),
    _text("key", primary_key=True),
    _text("fingerprint"),
    _moment("created_at"),
    _moment("lease_until"),
    sa.Column("status", sa.Integer),
    sa.Column("location", sa.Text),
    sa.Column("body", sa.LargeBinary),
    sa.Column(
        "member", sa.BigInteger
    ),  # that works on it (`member_sessions.py`), 0: a service alone
    sa.Index("ix_idempotency_created_at", "created_at"),
)

metric_windows: "TypedTable[MetricWindowRow]" = TypedTable(
    "metric_windows",
    METADATA,
    _text("deployment_id", primary_key=True),
    _text("endpoint_id", primary_key=True),
    sa.Column("width", sa.BigInteger, primary_key=True),  # seconds
    sa.Column("start", sa.BigInteger, primary_key=True),
    # Whose counts they are: a member of a cluster has a number of its own, and 0 is of a service alone, or of all.
    sa.Column("shard", sa.BigInteger, primary_key=True, server_default="0"),
    sa.Column("window", sa.LargeBinary, nullable=False),  # encoded by `metrics/columns.py`
    sa.Column("minutes", sa.LargeBinary),  # an hour's 60 records without sketches; null: a member's
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

# The newer counts of metric windows, with the same keys: in rows of their own, since SQLite would give a longer row a
# page of its own. Missing where an earlier version has written the window.
finer_windows: "TypedTable[FinerWindowRow]" = TypedTable(
    "finer_windows",
    METADATA,
    _text("deployment_id", primary_key=True),
    _text("endpoint_id", primary_key=True),
    sa.Column("width", sa.BigInteger, primary_key=True),
    sa.Column("start", sa.BigInteger, primary_key=True),
    sa.Column("shard", sa.BigInteger, primary_key=True),
    sa.Column("counts", sa.LargeBinary, nullable=False),
    sqlite_with_rowid=False,
)

# The length of each list of a tenant, so that a page needs no count over the table.
resource_counts: "TypedTable[ResourceCountRow]" = TypedTable(
    "resource_counts",
    METADATA,
    _text("client_id", primary_key=True),
    _text("resource", primary_key=True),
    _whole("number"),
)


def _audit_columns() -> "tuple[sa.Column[Any], ...]":
    return (
        _moment("at"),
        _text("client_id"),
        _text("key_id"),
        _text("action"),
        sa.Column("resource_id", sa.Text),
        sa.Column("status", sa.Integer, nullable=False),
        _text("address"),
        _text("request_id"),
        sa.Column("prompt_tokens", sa.BigInteger),
        sa.Column("completion_tokens", sa.BigInteger),
        sa.Column("mac", sa.LargeBinary, nullable=False),
    )


# Its seals are over the row and the one before: `audit.py`.
audit: "TypedTable[AuditRow]" = TypedTable(
    "audit",
    METADATA,
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    *_audit_columns(),
    sa.Index("ix_audit_client_id_seq", "client_id", "seq"),
)

# Rows that are committed and not in the chain yet, each sealed by itself. Postgres only.
unlinked_audit: "TypedTable[UnlinkedAuditRow]" = TypedTable(
    "unlinked_audit",
    METADATA,
    sa.Column("position", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
    *_audit_columns(),
)

# One row: which installation this database belongs to (`installation.py`).
installation: "TypedTable[InstallationRow]" = TypedTable(
    "installation",
    METADATA,
    _text("id", primary_key=True),
    _whole("starts", server_default="0"),
    sa.Column("key_check", sa.LargeBinary),
    _moment("newest_time", optional=True),
    sa.Column("cluster", sa.Text),  # null: no cluster has used it
)

# Who leads a cluster (`leader_lease.py`). The lease has a table of its own, so that renewing it never waits for the
# leader's transactions, each of which locks the row with its epoch.
leaders: "TypedTable[LeaderRow]" = TypedTable(
    "leaders",
    METADATA,
    _text("role", primary_key=True),
    _text("owner"),
    _whole("epoch"),
)

leader_leases: "TypedTable[LeaderLeaseRow]" = TypedTable(
    "leader_leases",
    METADATA,
    _text("role", primary_key=True),
    _whole("epoch"),
    _moment("lease_until"),
)

# The requests of a client in one window of a minute that the members of a cluster have taken (`rate_windows.py`).
# Postgres writes no log of it: after a crash the windows begin again.
rate_windows: "TypedTable[RateWindowRow]" = TypedTable(
    "rate_windows",
    METADATA,
    _text("client_id", primary_key=True),
    _text("kind", primary_key=True),
    sa.Column("ends", sa.BigInteger, primary_key=True),  # epoch seconds
    _whole("taken"),
    _whole("chunk"),  # what was taken last
)

# The agents that the members of a cluster share (`agent_records.py`); only the leader writes here.
agents: "TypedTable[AgentRow]" = TypedTable(
    "agents",
    METADATA,
    _text("name", primary_key=True),
    _text("base"),
    _text("digest"),  # of the base model's files
    _whole("number"),
    _text("state"),
    sa.Column("host", sa.Text),
    sa.Column("port", sa.BigInteger),
    sa.Column("certificate", sa.Text),  # SHA-256
)

# How the starts of replicas have gone, by base model (`agent_records.py`); only the leader writes here.
failed_starts: "TypedTable[FailedStartsRow]" = TypedTable(
    "failed_starts",
    METADATA,
    _text("base", primary_key=True),
    _whole("total"),
    _whole("in_a_row"),
    _text("error"),  # of the last one
    _moment("paused_until"),
)

# The requests of each member of a cluster (`member_demand.py`). Unlogged, like `rate_windows`: every member writes its
# row again within a second.
member_demands: "TypedTable[MemberDemandRow]" = TypedTable(
    "member_demands",
    METADATA,
    _text("member", primary_key=True),
    _moment("written_at"),
    _moment("lapses_at"),
    _json("demand"),
)

# The ages of the requests in flight at each member of a cluster (`member_ages.py`). Unlogged, as `member_demands`.
member_ages: "TypedTable[MemberAgesRow]" = TypedTable(
    "member_ages",
    METADATA,
    _text("member", primary_key=True),
    _moment("written_at"),
    _json("ages"),
)
