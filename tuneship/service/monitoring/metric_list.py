"""Lists all metrics with kind, labels and meaning. The scrape is made from it, and a test compares the docs with it.

Labels hold ids and the service's own words only. A metric of the machine is shown to keys with the scope
`machine:read`, all others to each tenant for itself.
"""

from dataclasses import dataclass
from typing import Literal

from tuneship.store.database import tables


@dataclass(frozen=True)
class MetricKind:
    """One metric; a counter's name ends with `_total`, durations are in seconds and sizes in bytes."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    is_machine: bool = False


ALL: list[MetricKind] = []


def _listed(metric: MetricKind) -> MetricKind:
    ALL.append(metric)
    return metric


def _counter(name: str, *labels: str, meaning: str) -> MetricKind:
    return _listed(MetricKind(name, "counter", labels, meaning))


def _gauge(name: str, *labels: str, meaning: str) -> MetricKind:
    return _listed(MetricKind(name, "gauge", labels, meaning))


def _histogram(name: str, *labels: str, meaning: str) -> MetricKind:
    return _listed(MetricKind(name, "histogram", labels, meaning))


def _machine(
    kind: Literal["counter", "gauge", "histogram"], name: str, *labels: str, meaning: str
) -> MetricKind:
    return _listed(MetricKind(name, kind, labels, meaning, is_machine=True))


TARGET = ("deployment_id", "endpoint_id")

# Of each tenant.
REQUESTS = _counter(
    "tuneship_requests_total",
    "operation",
    "status",
    meaning="Answered requests by operation and class of the HTTP status (2xx, 4xx, 5xx; none: the connection ended).",
)
REQUEST_DURATION = _histogram(
    "tuneship_request_duration_seconds",
    "operation",
    meaning="Time from a request to the end of its answer, streams included.",
)
GENERATIONS = _counter(
    "tuneship_generations_total",
    *TARGET,
    "outcome",
    meaning="Generations and embeddings that ended: success, server_error, cancelled by the caller, or refused.",
)
GENERATION_DURATION = _histogram(
    "tuneship_generation_duration_seconds",
    *TARGET,
    meaning="Time from acceptance to the last token of successful generations, waiting included; not of batches.",
)
FIRST_TOKEN = _histogram(
    "tuneship_time_to_first_token_seconds",
    *TARGET,
    meaning="Time from acceptance to the first token of successful generations, waiting included; not of batches.",
)
TOKENS = _counter(
    "tuneship_tokens_total",
    *TARGET,
    "direction",
    meaning="Tokens that the model read (input) and wrote (output).",
)
EMPTY = _counter(
    "tuneship_empty_completions_total", *TARGET, meaning="Successful generations without any text."
)
# Of successful requests for embeddings: the requests, their texts and the tokens of these.
EMBEDDINGS = (
    _counter(
        "tuneship_embedding_requests_total",
        *TARGET,
        meaning="Successful requests for embeddings, which are among the generations, too.",
    ),
    _counter("tuneship_embedded_texts_total", *TARGET, meaning="Texts that they had."),
    _counter(
        "tuneship_embedded_tokens_total",
        *TARGET,
        meaning="Tokens of these texts, which are among the tokens that the model read, too.",
    ),
)
IN_FLIGHT = _gauge(
    "tuneship_generations_in_flight",
    "deployment_id",
    meaning="Generations that were accepted and have not ended.",
)
QUEUED = _gauge(
    "tuneship_generations_queued",
    "deployment_id",
    meaning="Generations in flight that wait for their first token.",
)
REPLICAS = _gauge(
    "tuneship_deployment_replicas", "deployment_id", meaning="Replicas that serve the deployment."
)
HEALTHY = _gauge(
    "tuneship_deployment_healthy",
    "deployment_id",
    meaning="1 if the last health check was passed, or the deployment sleeps; else 0.",
)
# By the table of the resource.
STATES = [
    (
        table,
        _gauge(f"tuneship_{table.name}", "status", meaning=f"{table.name.capitalize()} by state."),
    )
    for table in tables.RESOURCES
    if "status" in table.c
]
TRAFFIC = _gauge(
    "tuneship_endpoint_traffic_percentage",
    "endpoint_id",
    "deployment_id",
    meaning="Share of an endpoint's traffic that a deployment gets, e.g. that of a canary.",
)
PENDING = _gauge(
    "tuneship_webhook_deliveries_pending",
    "webhook_id",
    meaning="Events that wait for an attempt to deliver them.",
)
OLDEST = _gauge(
    "tuneship_webhook_oldest_pending_seconds",
    "webhook_id",
    meaning="Age of the oldest event that waits; 0 if none does.",
)
ACTIVE = _gauge(
    "tuneship_webhook_active",
    "webhook_id",
    meaning="1, or 0 for a webhook that was switched off.",
)

# Of the machine.
BUILD = _machine("gauge", "tuneship_build_info", "version", meaning="1, with the version.")
ALL_REQUESTS = _machine(
    "counter",
    "tuneship_machine_requests_total",
    "operation",
    "status",
    meaning="Answered requests of all tenants, and of callers without a valid key (operation: none).",
)
ALL_GENERATIONS = _machine(
    "counter",
    "tuneship_machine_generations_total",
    "outcome",
    meaning="Generations of all tenants that ended.",
)
ALL_DURATION = _machine(
    "histogram",
    "tuneship_machine_generation_duration_seconds",
    meaning="Durations of the successful generations of all tenants.",
)
ALL_FIRST_TOKEN = _machine(
    "histogram",
    "tuneship_machine_time_to_first_token_seconds",
    meaning="Times to the first token of the successful generations of all tenants.",
)
ALL_TOKENS = _machine(
    "counter", "tuneship_machine_tokens_total", "direction", meaning="Tokens of all tenants."
)
ALL_EMBEDDINGS = (
    _machine(
        "counter",
        "tuneship_machine_embedding_requests_total",
        meaning="Successful requests for embeddings of all tenants.",
    ),
    _machine("counter", "tuneship_machine_embedded_texts_total", meaning="Texts that they had."),
    _machine("counter", "tuneship_machine_embedded_tokens_total", meaning="Tokens of these texts."),
)
ALL_IN_FLIGHT = _machine(
    "gauge",
    "tuneship_machine_generations_in_flight",
    meaning="Generations in flight of all tenants.",
)
ALL_STATES = [
    (
        table,
        _machine(
            "gauge",
            f"tuneship_machine_{table.name}",
            "status",
            meaning=f"{table.name.capitalize()} of all tenants.",
        ),
    )
    for table, _ in STATES
]
ALL_PENDING = _machine(
    "gauge",
    "tuneship_machine_webhook_deliveries_pending",
    meaning="Events of all tenants that wait for an attempt to deliver them.",
)
ALL_OLDEST = _machine(
    "gauge",
    "tuneship_machine_webhook_oldest_pending_seconds",
    meaning="Age of the oldest event that waits; 0 if none does.",
)
AUDIT_AGE = _machine(
    "gauge",
    "tuneship_audit_head_age_seconds",
    meaning="Time since the newest signed head last stood for the whole audit chain; it is checked every minute.",
)
FREE_MEMORY = _machine(
    "gauge",
    "tuneship_machine_memory_free_bytes",
    meaning="Memory that a process can still take, within the limit of a container.",
)
FREE_DISK = _machine(
    "gauge",
    "tuneship_machine_disk_free_bytes",
    meaning="Free bytes on the disk of the data directory.",
)

REPLICA = ("base_model", "replica")
REPLICA_MEMORY = _machine(
    "gauge", "tuneship_replica_memory_bytes", *REPLICA, meaning="Resident memory of the process."
)
# By the name that the engine gives them in its health check; an engine may lack some.
OF_REPLICAS = {
    "running": _machine(
        "gauge",
        "tuneship_replica_running",
        *REPLICA,
        meaning="Sequences in the running batch at the last health check (once a second).",
    ),
    "waiting": _machine(
        "gauge", "tuneship_replica_waiting", *REPLICA, meaning="Requests in its queue."
    ),
    "rows": _machine(
        "gauge", "tuneship_replica_slots", *REPLICA, meaning="Sequences that it runs at once."
    ),
    "adapters": _machine(
        "gauge", "tuneship_replica_adapters", *REPLICA, meaning="Adapters that it has loaded."
    ),
    "cache_bytes": _machine(
        "gauge", "tuneship_replica_kv_cache_bytes", *REPLICA, meaning="Allocated KV cache."
    ),
    "cache_limit_bytes": _machine(
        "gauge",
        "tuneship_replica_kv_cache_limit_bytes",
        *REPLICA,
        meaning="Most that its KV cache may take.",
    ),
    "steps": _machine(
        "counter", "tuneship_replica_steps_total", *REPLICA, meaning="Forward passes."
    ),
    "generated_tokens": _machine(
        "counter",
        "tuneship_replica_generated_tokens_total",
        *REPLICA,
        meaning="Generated tokens; divided by the forward passes it is the mean batch size.",
    ),
    "reused_tokens": _machine(
        "counter",
        "tuneship_replica_reused_tokens_total",
        *REPLICA,
        meaning="Prompt tokens that the prefix cache had.",
    ),
}
