"""Deployments on the wire (§2.4, §3, §4.4, §4.5, §4.9): create, get, list, update, delete, logs.

The replies hold the fields of both references (profile `auto`); `tuneship/service/context/profiles.py` reduces them for
a client that asks for one reference.
"""

from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, cast

from pydantic import AliasChoices, ConfigDict, Field, computed_field, model_validator
from pydantic_core import PydanticCustomError

from tuneship.contract.common import (
    ComplianceMode,
    CreateRequest,
    DeploymentId,
    EncryptionLevel,
    Limit,
    LogLimit,
    ModelId,
    Name,
    Offset,
    Pagination,
    Reply,
    Request,
    TagKey,
    Tags,
    TagValue,
    Timestamp,
    absent,
)
from tuneship.contract.declaring import examples
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.pages import by_next_token
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, Streamed, Verb
from tuneship.contract.embeddings import embed
from tuneship.contract.errors import (
    DeploymentError,
    InstanceTypeUnavailable,
    ModelNotFound,
    QuotaExceeded,
)
from tuneship.contract.generation import generate
from tuneship.contract.metrics import get_deployment_metrics
from tuneship.contract.reports.deployment_logs import DeploymentLogs, LogFilter, LogToken

# 0 is for `auto_scaling`, where an idle deployment sleeps.
Replicas = Annotated[int, Field(ge=0, le=64)]
ShortText = Annotated[str, Field(min_length=1, max_length=64)]
Region = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class DeploymentStatus(StrEnum):
    """States of a deployment; a new one is `creating`, then `running` or `failed`.

    `updating` is a change: the existing replicas continue to answer. `failed` has an `error`, and only an update or
    a delete leaves it. `deleting` becomes `deleted`; such a deployment can be fetched for 24 hours, then it is 404.
    """

    CREATING = "creating"
    RUNNING = "running"
    UPDATING = "updating"
    FAILED = "failed"
    DELETING = "deleting"
    DELETED = "deleted"


# The moves of a deployment that serves, and of one that is being started or changed.
_FROM_RUNNING = frozenset(
    {DeploymentStatus.UPDATING, DeploymentStatus.FAILED, DeploymentStatus.DELETING}
)
_FROM_STARTING = _FROM_RUNNING | {DeploymentStatus.RUNNING}
MOVES: dict[DeploymentStatus, frozenset[DeploymentStatus]] = {
    DeploymentStatus.CREATING: _FROM_STARTING,
    DeploymentStatus.RUNNING: _FROM_RUNNING,
    DeploymentStatus.UPDATING: _FROM_STARTING,
    # It is not started again by itself: a loop of tries would hide the reason.
    DeploymentStatus.FAILED: frozenset({DeploymentStatus.UPDATING, DeploymentStatus.DELETING}),
    DeploymentStatus.DELETING: frozenset({DeploymentStatus.DELETED}),
    DeploymentStatus.DELETED: frozenset(),
}
# While a deployment is changed, the replicas it has go on answering.
SERVING = frozenset({DeploymentStatus.RUNNING, DeploymentStatus.UPDATING})
GONE = frozenset({DeploymentStatus.DELETING, DeploymentStatus.DELETED})
LIVE = frozenset(MOVES) - GONE


class ModelConfiguration(Request):
    """Limits and defaults of generation. In an update, null resets a field to the model's own value."""

    context_length: Annotated[int | None, Field(ge=1)] = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    default_temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    default_top_p: Annotated[float | None, Field(gt=0, le=1)] = None


class VpcConfig(CreateRequest):
    """A VPC configuration. It is stored and returned, and protects nothing: the service's machine has no VPC."""

    subnet_ids: Annotated[list[ShortText], Field(max_length=64)] = Field(default_factory=list[str])
    security_group_ids: Annotated[list[ShortText], Field(max_length=64)] = Field(
        default_factory=list[str]
    )


class DeploymentSecuritySettings(CreateRequest):
    """Safeguards. One that the installation cannot enforce is refused by name, never accepted and ignored.

    The refusal is a 422 whose detail has the code `not_enforced`; `GET /healthz` lists what is enforced.
    `network_isolation` needs a kernel with the filters, and neither it nor `encryption_level: maximum` goes with a base
    model that vLLM serves. A model that was trained in `compliance_mode: hipaa` is deployed in that mode only.
    """

    network_isolation: bool = False
    private_endpoints: bool = False
    encryption_level: EncryptionLevel = "standard"
    audit_logging: bool = False
    compliance_mode: ComplianceMode = "none"


def _by_either_name(schema: dict[str, Any]) -> None:
    """Add `model_id`, the short reference's name of `model_name`; one of the two is required."""
    schema["properties"]["model_id"] = schema["properties"]["model_name"] | {"title": "Model Id"}
    schema["required"].remove("model_name")
    # Written with `if`, code generators still see one class; `oneOf` would give them two.
    schema["if"] = {"required": ["model_id"]}
    schema["else"] = {"required": ["model_name"]}


class DeploymentCreate(CreateRequest):
    """A deployment as a client asks for it; the model is `model_name`, or `model_id` in the short reference (§4.9)."""

    model_config = ConfigDict(json_schema_extra=_by_either_name)

    model_name: Annotated[
        ModelId,
        Field(
            description="A tuned model or a base model; `model_id` is another name of the field.\n\n"
            "Without either the request is 400; with both, of different models, 422."
        ),
    ]
    deployment_name: Name
    compute_type: Annotated[
        Literal["cpu", "gpu"],
        Field(
            description="`gpu` needs a machine with a GPU and a base model that vLLM serves; otherwise it is 409 "
            "`instance_type_unavailable`."
        ),
    ] = "cpu"
    instance_type: Annotated[
        ShortText,
        Field(
            description="A name from `GET /v1/instance-types`.\n\n"
            "Any other name, a type that this installation does not have, and one that is not offered in the region "
            "are 409 `instance_type_unavailable`."
        ),
    ] = "local"
    min_replicas: Annotated[
        Replicas,
        Field(
            description="Replicas that always run. 0, with `auto_scaling` only: an idle deployment sleeps.\n\n"
            "It is then `running` with `current_replicas` 0, and the next request wakes it and waits."
        ),
    ] = 1
    max_replicas: Replicas | None = None
    auto_scaling: Annotated[
        bool,
        Field(
            description="Follow the load between `min_replicas` and `max_replicas`.\n\n"
            "More replicas are started when a request has waited a second in the queue, as far as the machine can "
            "hold them; one is ended when fewer would have been enough for five minutes. The operator may set other "
            "times."
        ),
    ] = False
    region: Annotated[
        ShortText,
        Field(
            description="A region in which the type is offered; `local` unless the operator lists others."
        ),
    ] = "local"
    vpc_config: VpcConfig | None = None
    tags: Tags = Field(default_factory=dict)
    # Pydantic keeps the name `model_config` for itself.
    generation: Annotated[ModelConfiguration, Field(alias="model_config")] = Field(
        default_factory=ModelConfiguration
    )
    security_settings: DeploymentSecuritySettings = Field(
        default_factory=DeploymentSecuritySettings
    )

    @model_validator(mode="before")
    @classmethod
    def _short_reference_name(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        # A copy: the caller's body must not lose its field.
        fields = dict(cast("dict[str, Any]", value))
        if fields.get("model_id") is None:
            return fields
        model_id = fields.pop("model_id")
        if fields.setdefault("model_name", model_id) != model_id:
            raise PydanticCustomError(
                "conflict", "must name the same model as model_name", {"param": "model_id"}
            )
        return fields


# Fixed for life, since a change of one of them would be another deployment. Ignoring one silently would
# let a caller believe that it was changed, so they are refused by name.
CREATE_ONLY = (
    "model_name",
    "model_id",
    "compute_type",
    "instance_type",
    "region",
    "vpc_config",
    "security_settings",
)


class DeploymentUpdate(Request):
    """A merge patch (RFC 7396): fields that are not sent stay; null removes a tag or resets a `model_config` field.

    Fields that only a create may have are 422 by name; fields that no request has, and a body without any, are 400.
    """

    deployment_name: Name | None = None
    min_replicas: Replicas | None = None
    max_replicas: Replicas | None = None
    auto_scaling: bool | None = None
    tags: Annotated[dict[TagKey, TagValue | None] | None, Field(max_length=64)] = None
    generation: Annotated[ModelConfiguration | None, Field(alias="model_config")] = None

    @model_validator(mode="before")
    @classmethod
    def _create_only(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name in CREATE_ONLY:
            if name in value:
                raise PydanticCustomError(
                    "create_only", "can be set only on create", {"param": name}
                )
        return cast("dict[str, Any]", value)


class DeploymentListItem(Reply):
    """A deployment in a list, and the base of its other forms. It has the names of both references (§4.9)."""

    id: Annotated[str, Field(validation_alias=AliasChoices("id", "deployment_id"))]
    model_name: Annotated[str, Field(validation_alias=AliasChoices("model_name", "model_id"))]
    deployment_name: str
    status: Annotated[str, Field(description="A `DeploymentStatus`.")]
    endpoint: str = ""
    created_at: Timestamp
    updated_at: Timestamp | None = None
    compute_type: str = "cpu"
    instance_type: str = "local"
    tags: dict[str, str] = Field(default_factory=dict)

    @computed_field
    @property
    def deployment_id(self) -> str:
        """The short reference's name of `id`."""
        return self.id

    @computed_field
    @property
    def model_id(self) -> str:
        """The short reference's name of `model_name`."""
        return self.model_name


class DeploymentUpdated(DeploymentListItem):
    """A deployment in the reply to update."""

    min_replicas: int = 1
    max_replicas: int = 1
    auto_scaling: bool = False
    generation: Annotated[dict[str, Any] | None, Field(alias="model_config", exclude_if=absent)] = (
        None
    )


class DeploymentCreated(DeploymentListItem):
    """A deployment in the reply to create."""

    min_replicas: int = 1
    max_replicas: int = 1
    auto_scaling: bool = False
    region: str = "local"


class DeploymentPage(Reply):
    """One page of deployments, newest first; the short reference has no pagination (§4.9)."""

    deployments: list[DeploymentListItem]
    pagination: Pagination | None = None


class DeploymentFailure(Reply):
    """Why a deployment failed."""

    code: str
    message: str


class Deployment(DeploymentCreated):
    """A deployment in the reply to get."""

    current_replicas: int = 0
    generation: Annotated[dict[str, Any], Field(alias="model_config")] = Field(
        default_factory=dict[str, Any]
    )
    security_settings: dict[str, Any] = Field(default_factory=dict[str, Any])
    vpc_config: Annotated[dict[str, Any] | None, Field(exclude_if=absent)] = None
    health: Annotated[
        str | None,
        Field(exclude_if=absent, description="`unknown`, `healthy` or `unhealthy` (additive)."),
    ] = None
    error: Annotated[DeploymentFailure | None, Field(exclude_if=absent)] = None


class DeploymentDeleted(Reply):
    """The answer to delete; the deployment is `deleted` once its requests have drained."""

    id: Annotated[str, Field(validation_alias=AliasChoices("id", "deployment_id"))]
    status: str

    @computed_field
    @property
    def deployment_id(self) -> str:
        """The short reference's name of `id`."""
        return self.id


@operation(
    "POST",
    "/v1/deployments",
    scope="deployments:write",
    status=201,
    errors=(ModelNotFound, DeploymentError, InstanceTypeUnavailable, QuotaExceeded),
    headers=("X-API-Profile",),
    example=Example(
        examples.DEPLOYMENT_REQUESTS,
        examples.CREATED_DEPLOYMENT,
    ),
)
def create_deployment(deployment: DeploymentCreate) -> DeploymentCreated:
    """Serve a model (§4.4). The answer says `creating`; poll get until `running`.

    A deployment counts as `failed` after three starts without success, or when its model does not compute what its
    training computed; `error` says why.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/deployments/{deployment_id}",
    scope="deployments:read",
    headers=("X-API-Profile",),
    example=Example(reply=examples.RUNNING_DEPLOYMENT),
)
def get_deployment(deployment_id: DeploymentId) -> Deployment:
    """Fetch one deployment (§4.4)."""
    raise NotImplementedError


@operation(
    "GET",
    "/v1/deployments",
    scope="deployments:read",
    headers=("X-API-Profile",),
    example=Example(reply={"deployments": [examples.DEPLOYMENT_ITEM], "pagination": examples.PAGE}),
)
def list_deployments(
    limit: Limit = 20,
    offset: Offset = 0,
    status: DeploymentStatus | None = None,
    model_name: ModelId | None = None,
    region: Region | None = None,
    tags: Tags | None = None,
) -> DeploymentPage:
    """List deployments, newest first (§4.4); deleted ones only with `status=deleted`, for 24 hours."""
    raise NotImplementedError


@operation(
    "PATCH",
    "/v1/deployments/{deployment_id}",
    scope="deployments:write",
    errors=(DeploymentError, InstanceTypeUnavailable),
    headers=("If-Match", "X-API-Profile"),
    example=Example(
        examples.DEPLOYMENT_CHANGES,
        examples.UPDATED_DEPLOYMENT,
    ),
)
def update_deployment(deployment_id: DeploymentId, update: DeploymentUpdate) -> DeploymentUpdated:
    """Change name, replicas, tags or generation defaults (§4.4); fields not sent keep their values.

    The model of a deployment never changes: serve the other one beside it, and shift the traffic of an endpoint.
    """
    raise NotImplementedError


@operation(
    "DELETE",
    "/v1/deployments/{deployment_id}",
    scope="deployments:write",
    errors=(DeploymentError,),
    headers=("If-Match", "X-API-Profile"),
    example=Example(
        reply={"id": examples.CANDIDATE, "deployment_id": examples.CANDIDATE, "status": "deleting"}
    ),
)
def delete_deployment(deployment_id: DeploymentId, force: bool = False) -> DeploymentDeleted:
    """Drain and remove a deployment (§4.4); refused while an endpoint sends it traffic, unless forced.

    Generations may finish within 30 seconds. What still runs then is ended with 409 `deployment_error`, in a stream as
    its `error` event; later requests get the same. With `force=true` nothing is waited for, and the endpoints that send
    it traffic become `inactive`; otherwise the 409 names them. A member of a canary endpoint at 0 % does not count.
    Deleting it again is 200, whatever `If-Match` says.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/deployments/{deployment_id}/logs",
    scope="logs:read",
    example=Example(reply=examples.DEPLOYMENT_LOGS),
)
def get_deployment_logs(  # noqa: PLR0913 - the description's own parameters and three names of one token
    deployment_id: DeploymentId,
    start_time: datetime | None = None,
    end_time: datetime | None = None,
    limit: LogLimit = 100,
    filter: LogFilter | None = None,  # noqa: A002 - the description's own name
    order: Literal["asc", "desc"] = "desc",
    next_token: LogToken | None = None,
    after: LogToken | None = None,
    cursor: LogToken | None = None,
) -> DeploymentLogs:
    """Read a deployment's log (§4.5). `next_token` (or `after`, `cursor`) continues behind the last page.

    It has changes of state, replicas that start and end, and generations that failed or were refused, by request id.
    Successes are in the metrics only. A token belongs to its deployment, filter and order: with others it is 422.
    """
    raise NotImplementedError


class Deployments(Resource[C_co]):
    """Models that answer requests."""

    create = Verb(create_deployment)
    get = Verb(get_deployment)
    list = Verb(list_deployments)
    iterate = Pages(list_deployments, lambda page: page.deployments)
    update = Verb(update_deployment)
    delete = Verb(delete_deployment)
    metrics = Verb(get_deployment_metrics)
    logs = Verb(get_deployment_logs)
    iterate_logs = Pages(get_deployment_logs, lambda page: page.logs, by_next_token)
    stream = Streamed(generate)
    generate = Verb(generate)
    embed = Verb(embed)
