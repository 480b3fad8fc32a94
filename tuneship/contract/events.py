"""Events on the wire (§6): what happened to a job, a dataset, a deployment and the like; pushed and pulled alike.

The same object is the body of a webhook and an entry of `GET /v1/events`. `id` is the `webhook-id` of every try;
`data.sequence` counts the events of one resource without gaps, and no order of arrival is promised.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from tuneship.contract.common import LogCursor, LogLimit, Reply, TimestampMs
from tuneship.contract.declaring.examples import EVENT, JOB, NOON_MS
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.pages import by_after
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, Verb


class EventKind(StrEnum):
    """The 16 kinds of §6, and (additive) a canary split that its lapsed lease reverted, the ends of batches and
    evaluations, those of evals' runs under OpenAI's names, too, and releases that wait for a person or have ended.
    """

    JOB_QUEUED = "fine_tuning.job.queued"
    JOB_STARTED = "fine_tuning.job.started"
    JOB_EPOCH_COMPLETED = "fine_tuning.job.epoch_completed"
    JOB_SUCCEEDED = "fine_tuning.job.succeeded"
    JOB_FAILED = "fine_tuning.job.failed"
    JOB_CANCELLED = "fine_tuning.job.cancelled"
    DATASET_UPLOADED = "dataset.uploaded"
    DATASET_PROCESSED = "dataset.processed"
    DATASET_FAILED = "dataset.failed"
    DEPLOYMENT_CREATED = "deployment.created"
    DEPLOYMENT_UPDATED = "deployment.updated"
    DEPLOYMENT_DELETED = "deployment.deleted"
    DEPLOYMENT_STATUS_CHANGED = "deployment.status_changed"
    DEPLOYMENT_HEALTH_CHANGED = "deployment.health_changed"
    DEPLOYMENT_SCALING_CHANGED = "deployment.scaling_changed"
    DEPLOYMENT_ERROR = "deployment.error"
    CANARY_ENDPOINT_REVERTED = "canary_endpoint.reverted"
    CANARY_ENDPOINT_PAUSED = "canary_endpoint.paused"
    CANARY_ENDPOINT_RESUMED = "canary_endpoint.resumed"
    BATCH_COMPLETED = "batch.completed"
    BATCH_FAILED = "batch.failed"
    BATCH_EXPIRED = "batch.expired"
    BATCH_CANCELLED = "batch.cancelled"
    EVALUATION_COMPLETED = "evaluation.completed"
    EVALUATION_FAILED = "evaluation.failed"
    EVALUATION_CANCELLED = "evaluation.cancelled"
    EVAL_RUN_SUCCEEDED = "eval.run.succeeded"
    EVAL_RUN_FAILED = "eval.run.failed"
    EVAL_RUN_CANCELED = "eval.run.canceled"
    RELEASE_WAITING = "release.waiting"
    RELEASE_ENDED = "release.ended"


def family_of(kind: str) -> str:
    """Kind of the resource, e.g. `fine_tuning.job` or `dataset`; it is the payload's `object`."""
    return kind.rpartition(".")[0]


KINDS = tuple(str(kind) for kind in EventKind)
# Subscriptions of a webhook: everything, a family, or one kind.
SUBSCRIPTIONS = ("*", *sorted({f"{family_of(kind)}.*" for kind in EventKind}), *KINDS)


def _known_kind(value: str) -> str:
    if value not in KINDS:
        raise ValueError("must be one of the event kinds")
    return value


def _known_subscription(value: str) -> str:
    if value not in SUBSCRIPTIONS:
        raise ValueError("must be *, a family like dataset.* or one of the event kinds")
    return value


Kind = Annotated[str, AfterValidator(_known_kind), Field(json_schema_extra={"enum": [*KINDS]})]
Subscription = Annotated[
    str, AfterValidator(_known_subscription), Field(json_schema_extra={"enum": [*SUBSCRIPTIONS]})
]


def covers(subscriptions: list[str], kind: str) -> bool:
    """Whether a webhook with these subscriptions gets events of this kind."""
    # Worked out, and not looked up: a family covers kinds that are added to it later.
    return not {"*", kind, f"{family_of(kind)}.*"}.isdisjoint(subscriptions)


class Event(Reply):
    """One change. `timestamp` and `created_at` are the same moment, under the names that receivers look for.

    `data` holds `object`, `id`, `status`, `sequence` and a summary of numbers and words of the service: no name, tag,
    prompt or completion. `sequence` counts the events of one resource without gaps, so a receiver can order them and
    drop repeated ones.
    """

    id: str
    type: str
    timestamp: TimestampMs
    created_at: TimestampMs
    data: dict[str, Any]


class EventPage(Reply):
    """Events, oldest first."""

    events: list[Event]
    pagination: LogCursor


def event(row: dict[str, Any]) -> Event:
    """The wire form of a stored event (`id`, `type`, `resource_id`, `sequence`, `created_at`, `data`)."""
    moment: datetime = row["created_at"]
    return Event(
        id=row["id"],
        type=row["type"],
        timestamp=moment,
        created_at=moment,
        data={
            # A newer version may have stored kinds that this one does not know.
            "object": family_of(row["type"]),
            "id": row["resource_id"],
            # Receivers may rely on the field; a kind that has a status sets it below.
            "status": None,
            "sequence": row["sequence"],
            **row["data"],
        },
    )


# Examples of the OpenAPI document.
EXAMPLE_EVENT = {
    "id": EVENT,
    "type": "fine_tuning.job.succeeded",
    "timestamp": NOON_MS,
    "created_at": NOON_MS,
    "data": {"object": "fine_tuning.job", "id": JOB, "status": "completed", "sequence": 5},
}


@operation(
    "GET",
    "/v1/events",
    scope="webhooks:read",
    example=Example(reply={"events": [EXAMPLE_EVENT], "pagination": {"after": "MTI4"}}),
)
def list_events(limit: LogLimit = 100, after: str | None = None) -> EventPage:
    """List the events of the last 30 days, oldest first (additive); for receivers that miss or cannot get calls.

    Each change has its event, and each event its change. A job is `queued`, `started`, `epoch_completed` for each
    epoch, and ends as `succeeded`, `failed` or `cancelled`; `cancelling` has no event. An upload or a combination is
    `dataset.uploaded`, then `processed` or `failed`. A deployment is `created`, `updated`, and `deleted` once it is
    gone; `status_changed` has `from` and `to`, `health_changed` comes from probes. `canary_endpoint.reverted`: a lease
    ran out (`lease_expired`), or a `person` decided so; `paused` and `resumed`: a person decided so.
    """
    raise NotImplementedError


class Events(Resource[C_co]):
    """Events of the last 30 days."""

    list = Verb(list_events)
    iterate = Pages(list_events, lambda page: page.events, by_after)
