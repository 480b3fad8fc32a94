"""Endpoints on the wire (§2.5, §4.6): one address that routes to one deployment, or splits its traffic over several.

Additive to the description: get, list by name, delete, update of a plain endpoint, `version` with `If-Match`, the
`lease` that reverts a canary's split by itself when nobody renews it, and what a person decides: revert, pause, resume.
"""

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from tuneship.contract.common import (
    ONE_LINE,
    AnyEndpointId,
    CanaryEndpointId,
    CreateRequest,
    DecisionReason,
    Deleted,
    DeploymentId,
    EndpointId,
    Limit,
    Name,
    Offset,
    Pagination,
    PersonName,
    Reply,
    Request,
    SignedInPerson,
    Ticket,
    Timestamp,
    absent,
)
from tuneship.contract.declaring.examples import (
    BASELINE,
    CANARY,
    CANDIDATE,
    ENDPOINT,
    LATER,
    NOON,
    PAGE,
    SERVICE,
)
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, Streamed, Verb
from tuneship.contract.embeddings import embed_by_endpoint
from tuneship.contract.errors import DeploymentError, InvalidRequestError, ResourceNotFound
from tuneship.contract.generation import generate_by_endpoint


class EndpointStatus(StrEnum):
    """States of an endpoint. `inactive`: a member was deleted by force; the next valid update activates it again.

    Generating through an inactive endpoint is 409, instead of an answer by the wrong model. `deleted` appears only in
    the answer to delete.
    """

    ACTIVE = "active"
    INACTIVE = "inactive"
    DELETED = "deleted"


class EndpointCreate(CreateRequest):
    """A plain endpoint as a client asks for it."""

    name: Name
    deployment_id: DeploymentId


class EndpointUpdate(Request):
    """A change of an endpoint; a new `deployment_id` is an atomic cut-over."""

    name: Name | None = None
    deployment_id: DeploymentId | None = None


class Endpoint(Reply):
    """A plain endpoint. `version` grows with every change of its target or state; it is the `ETag`."""

    id: str
    name: str
    deployment_id: str
    url: str
    created_at: Timestamp
    updated_at: Timestamp
    status: str
    version: Annotated[int | None, Field(exclude_if=absent)] = None


class EndpointPage(Reply):
    """One page of plain endpoints, newest first."""

    endpoints: list[Endpoint]
    pagination: Pagination


class EndpointDeleted(Deleted):
    """The reply to a delete of either kind of endpoint; the deployments stay as they are."""

    status: Literal["deleted"] = "deleted"


class Member(CreateRequest):
    """One deployment's share of an endpoint's traffic, in whole percent.

    The shares of a split sum to 100, and a share above 0 needs a deployment that serves.
    """

    id: DeploymentId
    traffic_percentage: Annotated[int, Field(ge=0, le=100)]


def _complete(members: list[Member]) -> list[Member]:
    # Twice the same deployment would be two shares of one, which no split can show.
    if len({member.id for member in members}) != len(members):
        raise ValueError("must name different deployments")
    total = sum(member.traffic_percentage for member in members)
    if total != 100:
        raise ValueError(f"must sum to 100, not {total}")
    return members


LargeKeyHandling = Literal["spread", "keep"]
RolloutId = Annotated[str, Field(min_length=1, max_length=128, pattern=ONE_LINE)]

# Different deployments whose shares sum to 100.
Members = Annotated[list[Member], Field(min_length=1, max_length=10), AfterValidator(_complete)]


class LeaseRequest(CreateRequest):
    """Return to `fallback` unless the lease is renewed within `seconds`.

    The service does this by itself, so it needs no caller that is still alive.
    """

    # A week at most: a pipeline that has died must not keep its split for ever.
    seconds: Annotated[int, Field(ge=1, le=604_800)]
    fallback: Members
    pausable: Annotated[
        bool,
        Field(
            description="Additive. Whether a person may pause the rollout. A caller that takes a refused split for "
            "a failure leaves it out."
        ),
    ] = False


class CanaryEndpointUpdate(CreateRequest):
    """The whole new split. Without `lease`, a running lease ends and the split stays.

    `rollout_id` and `large_keys` are part of the split: the next one replaces them.
    """

    # Never a part of a split: two callers who each change one share could end at a sum of 110.
    deployments: Members
    lease: LeaseRequest | None = None
    rollout_id: Annotated[
        RolloutId | None,
        Field(
            description="Additive. Goes into the draw of each routing key: the same id gives the same draw, another "
            "one an independent draw.\n\n"
            "Give each rollout its own, so that it is not always the same callers who come to a candidate."
        ),
    ] = None
    large_keys: Annotated[
        LargeKeyHandling | None,
        Field(
            description="Additive. `spread`, the default: large routing keys are drawn by request, as requests "
            "without a key are. `keep`: they stay at one deployment.\n\n"
            "A key is large with more than 2 % of the endpoint's requests of the last ten minutes, of at least 500, "
            "while several deployments have traffic. This is decided each minute, by each member of a cluster for its "
            "own requests."
        ),
    ] = None


class CanaryEndpointCreate(CanaryEndpointUpdate):
    """A canary endpoint as a client asks for it."""

    name: Name


class LeaseRenewal(CreateRequest):
    """A renewal of the lease; 0 seconds end it and keep the split."""

    seconds: Annotated[int, Field(ge=0, le=604_800)]


class MemberShare(Reply):
    """One deployment's share of the traffic."""

    id: str
    traffic_percentage: int


class Lease(Reply):
    """A running lease."""

    seconds: int
    expires_at: Timestamp
    fallback: list[MemberShare]
    pausable: bool = False


class CanaryDecision(CreateRequest):
    """A person's decision about a rollout in progress. The endpoint shows it, so it must not name a patient."""

    name: Annotated[
        PersonName | None, Field(description="Who decides. Left out: the id of the key.")
    ] = None
    reason: Annotated[DecisionReason | None, Field(description="Required in the hipaa mode.")] = (
        None
    )
    ticket: Annotated[Ticket | None, Field(description="Required in the hipaa mode.")] = None


class CanaryDecided(Reply):
    """A decision that stands: when it was made, by whom and why. `person`: null where a key was used."""

    at: Timestamp
    by: str
    reason: str | None = None
    ticket: str | None = None
    person: SignedInPerson | None = None


class CanaryEndpoint(Reply):
    """A canary endpoint. `version` grows with every change of split, lease or status; it is the `ETag`."""

    id: str
    name: str
    deployments: list[MemberShare]
    url: str
    created_at: Timestamp
    updated_at: Timestamp
    status: str
    version: Annotated[int | None, Field(exclude_if=absent)] = None
    lease: Lease | None = None
    rollout_id: str | None = None
    # Null: the service does not know large keys.
    large_keys: str | None = None
    paused: CanaryDecided | None = Field(
        default=None, description="Additive. Who has paused the rollout; null: nobody."
    )
    reverted: CanaryDecided | None = Field(
        default=None,
        description="Additive. Who has reverted the rollout to the present split; null: it came otherwise.",
    )


class CanaryEndpointPage(Reply):
    """One page of canary endpoints, newest first."""

    canary_endpoints: list[CanaryEndpoint]
    pagination: Pagination


# Examples of the OpenAPI document.
EXAMPLE_SPLIT = [
    {"id": BASELINE, "traffic_percentage": 90},
    {"id": CANDIDATE, "traffic_percentage": 10},
]

EXAMPLE_FALLBACK = [
    {"id": BASELINE, "traffic_percentage": 100},
    {"id": CANDIDATE, "traffic_percentage": 0},
]

EXAMPLE_ENDPOINT = {
    "id": ENDPOINT,
    "name": "icd",
    "deployment_id": CANDIDATE,
    "url": f"{SERVICE}/v1/endpoints/{ENDPOINT}/generate",
    "created_at": NOON,
    "updated_at": NOON,
    "status": "active",
    "version": 1,
}

EXAMPLE_CANARY = {
    "id": CANARY,
    "name": "icd-release",
    "deployments": EXAMPLE_SPLIT,
    "url": f"{SERVICE}/v1/endpoints/{CANARY}/generate",
    "created_at": NOON,
    "updated_at": LATER,
    "status": "active",
    "version": 3,
    "lease": {
        "seconds": 120,
        "expires_at": "2026-03-01T12:12:00Z",
        "fallback": EXAMPLE_FALLBACK,
        "pausable": True,
    },
    "rollout_id": "icd-release-7",
    "large_keys": "spread",
    "paused": None,
    "reverted": None,
}

EXAMPLE_DECISION = {"name": "A. Reviewer", "reason": "clinical_review", "ticket": "CHG-1042"}
EXAMPLE_DECIDED = {
    "at": LATER,
    "by": "A. Reviewer",
    "reason": "clinical_review",
    "ticket": "CHG-1042",
    "person": None,
}

EXAMPLE_REMOVED = {"deleted": True, "status": "deleted"}


@operation(
    "POST",
    "/v1/endpoints",
    scope="endpoints:write",
    errors=(ResourceNotFound, DeploymentError, (InvalidRequestError, 409)),
    status=201,
    example=Example(
        {"one deployment": {"name": "icd", "deployment_id": CANDIDATE}}, EXAMPLE_ENDPOINT
    ),
)
def create_endpoint(endpoint: EndpointCreate) -> Endpoint:
    """Make an endpoint that routes to one deployment (§4.6).

    Its deployment and all later ones are in the hipaa mode, or none of them is (409).
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/endpoints/{endpoint_id}",
    scope="endpoints:read",
    example=Example(reply=EXAMPLE_ENDPOINT),
)
def get_endpoint(endpoint_id: AnyEndpointId) -> Endpoint | CanaryEndpoint:
    """Fetch one endpoint; the id of a canary endpoint is found too (additive)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/endpoints",
    scope="endpoints:read",
    example=Example(reply={"endpoints": [EXAMPLE_ENDPOINT], "pagination": PAGE}),
)
def list_endpoints(limit: Limit = 20, offset: Offset = 0, name: Name | None = None) -> EndpointPage:
    """List plain endpoints, newest first (additive)."""
    raise NotImplementedError


@operation(
    "PATCH",
    "/v1/endpoints/{endpoint_id}",
    scope="endpoints:write",
    errors=(DeploymentError, (InvalidRequestError, 409)),
    headers=("If-Match",),
    example=Example(
        {"cut over": {"deployment_id": BASELINE}},
        {**EXAMPLE_ENDPOINT, "deployment_id": BASELINE, "updated_at": LATER, "version": 2},
    ),
)
def update_endpoint(endpoint_id: EndpointId, update: EndpointUpdate) -> Endpoint:
    """Rename an endpoint or cut it over to another deployment at once (additive); respects `If-Match`."""
    raise NotImplementedError


@operation(
    "DELETE",
    "/v1/endpoints/{endpoint_id}",
    scope="endpoints:write",
    headers=("If-Match",),
    example=Example(reply={"id": ENDPOINT, **EXAMPLE_REMOVED}),
)
def delete_endpoint(endpoint_id: EndpointId) -> EndpointDeleted:
    """Remove an endpoint; its deployment is kept (additive)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/canary-endpoints",
    scope="endpoints:write",
    errors=(ResourceNotFound, DeploymentError, (InvalidRequestError, 409)),
    status=201,
    example=Example(
        {
            "split": {"name": "icd-release", "deployments": EXAMPLE_FALLBACK},
            "with a lease": {
                "name": "icd-release",
                "deployments": EXAMPLE_SPLIT,
                "lease": {"seconds": 120, "fallback": EXAMPLE_FALLBACK},
            },
        },
        EXAMPLE_CANARY,
    ),
)
def create_canary_endpoint(endpoint: CanaryEndpointCreate) -> CanaryEndpoint:
    """Make an endpoint that splits its traffic (§4.6).

    Its deployments and all later ones are in the hipaa mode, or none of them is (409).
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/canary-endpoints/{endpoint_id}",
    scope="endpoints:read",
    example=Example(reply=EXAMPLE_CANARY),
)
def get_canary_endpoint(endpoint_id: CanaryEndpointId) -> CanaryEndpoint:
    """Fetch one canary endpoint (additive)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/canary-endpoints",
    scope="endpoints:read",
    example=Example(reply={"canary_endpoints": [EXAMPLE_CANARY], "pagination": PAGE}),
)
def list_canary_endpoints(
    limit: Limit = 20, offset: Offset = 0, name: Name | None = None
) -> CanaryEndpointPage:
    """List canary endpoints, newest first (additive)."""
    raise NotImplementedError


@operation(
    "PATCH",
    "/v1/canary-endpoints/{endpoint_id}",
    scope="endpoints:write",
    errors=(DeploymentError, (InvalidRequestError, 409)),
    headers=("If-Match",),
    example=Example(
        {
            "shift": {
                "deployments": EXAMPLE_SPLIT,
                "lease": {"seconds": 120, "fallback": EXAMPLE_FALLBACK},
            }
        },
        EXAMPLE_CANARY,
    ),
)
def update_canary_endpoint(
    endpoint_id: CanaryEndpointId, update: CanaryEndpointUpdate
) -> CanaryEndpoint:
    """Replace the whole split in one transaction (§4.6); `If-Match` refuses it if the split has changed since.

    While a person has paused the rollout, 409 for every split but the present one under its lease, and the fallback.
    """
    raise NotImplementedError


@operation(
    "DELETE",
    "/v1/canary-endpoints/{endpoint_id}",
    scope="endpoints:write",
    headers=("If-Match",),
    example=Example(reply={"id": CANARY, **EXAMPLE_REMOVED}),
)
def delete_canary_endpoint(endpoint_id: CanaryEndpointId) -> EndpointDeleted:
    """Remove a canary endpoint with its lease; its deployments are kept (additive)."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/canary-endpoints/{endpoint_id}/lease",
    scope="endpoints:write",
    errors=((InvalidRequestError, 409),),
    headers=("If-Match",),
    example=Example({"two minutes": {"seconds": 120}}, EXAMPLE_CANARY),
)
def renew_canary_lease(endpoint_id: CanaryEndpointId, renewal: LeaseRenewal) -> CanaryEndpoint:
    """Renew or end the lease (additive); 409 if there is none, or to end it while the rollout is paused."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/canary-endpoints/{endpoint_id}/pause",
    scope="releases:decide",
    errors=((InvalidRequestError, 409),),
    headers=("If-Match",),
    example=Example(
        {"a person decides": EXAMPLE_DECISION}, {**EXAMPLE_CANARY, "paused": EXAMPLE_DECIDED}
    ),
)
def pause_canary_endpoint(
    endpoint_id: CanaryEndpointId, decision: CanaryDecision
) -> CanaryEndpoint:
    """Hold the split of a rollout in progress until it is resumed (additive); the version does not change.

    Reverting lifts the pause, and so does the lease when it expires. 409 without a lease, for one that was not taken
    with `pausable`, and where the rollout is paused already.
    """
    raise NotImplementedError


@operation(
    "POST",
    "/v1/canary-endpoints/{endpoint_id}/resume",
    scope="releases:decide",
    errors=((InvalidRequestError, 409),),
    headers=("If-Match",),
    example=Example({"a person decides": EXAMPLE_DECISION}, EXAMPLE_CANARY),
)
def resume_canary_endpoint(
    endpoint_id: CanaryEndpointId, decision: CanaryDecision
) -> CanaryEndpoint:
    """Let a paused rollout continue (additive); the version does not change. 409 if it is not paused."""
    raise NotImplementedError


@operation(
    "POST",
    "/v1/canary-endpoints/{endpoint_id}/revert",
    scope="releases:decide",
    errors=((InvalidRequestError, 409),),
    headers=("If-Match",),
    example=Example(
        {"a person decides": EXAMPLE_DECISION},
        {
            **EXAMPLE_CANARY,
            "deployments": EXAMPLE_FALLBACK,
            "version": 4,
            "lease": None,
            "reverted": EXAMPLE_DECIDED,
        },
    ),
)
def revert_canary_endpoint(
    endpoint_id: CanaryEndpointId, decision: CanaryDecision
) -> CanaryEndpoint:
    """Roll back: end the rollout in progress and switch to its fallback at once (additive); 409 without a lease.

    The event `canary_endpoint.reverted` has the reason `person`.
    """
    raise NotImplementedError


class Endpoints(Resource[C_co]):
    """Addresses that route to one deployment each."""

    create = Verb(create_endpoint)
    get = Verb(get_endpoint)
    list = Verb(list_endpoints)
    iterate = Pages(list_endpoints, lambda page: page.endpoints)
    update = Verb(update_endpoint)
    delete = Verb(delete_endpoint)
    generate = Verb(generate_by_endpoint)
    stream = Streamed(generate_by_endpoint)
    embed = Verb(embed_by_endpoint)


class CanaryEndpoints(Resource[C_co]):
    """Addresses that split their traffic over deployments."""

    create = Verb(create_canary_endpoint)
    get = Verb(get_canary_endpoint)
    list = Verb(list_canary_endpoints)
    iterate = Pages(list_canary_endpoints, lambda page: page.canary_endpoints)
    update = Verb(update_canary_endpoint)
    delete = Verb(delete_canary_endpoint)
    renew_lease = Verb(renew_canary_lease)
    revert = Verb(revert_canary_endpoint)
    pause = Verb(pause_canary_endpoint)
    resume = Verb(resume_canary_endpoint)
    generate = Verb(generate_by_endpoint)
    stream = Streamed(generate_by_endpoint)
    embed = Verb(embed_by_endpoint)
