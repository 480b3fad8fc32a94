"""Parts that every resource file of the contract uses: base models, ids, names, tags, times, pages."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, cast

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema

from tuneship.contract.declaring.notebook_table import html_table

# Validation context of the service. Ids are opaque to a client (§1), so only the service checks
# their form.
SERVICE = "service"


EncryptionLevel = Annotated[
    Literal["standard", "maximum"],
    Field(
        description="Every new file is encrypted at both levels; `maximum` also refuses files that are not."
    ),
]
ComplianceMode = Annotated[
    Literal["none", "hipaa"],
    Field(
        description="`hipaa` turns every other safeguard on; a setting that contradicts it is refused by name. "
        "What is in this mode answers to requests over TLS or from the service's own machine, with keys of at most "
        "90 days.\n\n"
        "422, with these codes in `details`: `contradiction`, a setting was sent that contradicts the mode; "
        "`missing_prerequisite`, the installation, the key or the connection lacks something (one detail for each); "
        "`lesser_mode`, a model that was trained in the mode would be deployed without it, which must be asked for "
        "and is not inherited. 409 `dataset_error`: the dataset of a job was not uploaded under the same rules. Later "
        "requests about the resource, or about the job's tuned model, are 400 over plain HTTP from another machine, "
        "and 403 with a key that was made for more than 90 days."
    ),
]


class StrictModel(BaseModel):
    """Base of everything that people write: bodies, forms and files. Unknown fields and wrong types are refused.

    A typo must not switch a safeguard off.
    """

    # Fields may begin with `model_`, which pydantic would warn about.
    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Request(StrictModel):
    """A body as a client sends it. Errors never quote it."""

    # The input may be a patient's text, and errors end in logs.
    model_config = ConfigDict(hide_input_in_errors=True)


class CreateRequest(Request):
    """A create: a field sent as null counts as not sent."""

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast("dict[str, Any]", value)
        return {key: field for key, field in fields.items() if field is not None}


class Reply(BaseModel):
    """An answer: the client ignores fields that it does not know."""

    # A newer service may send more, within one version of the API.
    model_config = ConfigDict(extra="ignore", protected_namespaces=(), hide_input_in_errors=True)

    def _repr_html_(self) -> str:
        """Show the reply in a notebook, with no more than its `repr` has."""
        return html_table(type(self).__name__, self.__repr_args__())


class LogCursor(Reply):
    """`after` continues behind the last entry; it stays when there is nothing new, and is null without any entry.

    Asking again with the last `after` follows the entries without end.
    """

    after: str | None


def absent(value: object) -> bool:
    """Whether a field has no value: `Field(exclude_if=absent)` leaves the key out of the reply."""
    return value is None


@dataclass(frozen=True)
class IdOf:
    """Annotates an id by its prefix, a regular expression, e.g. `Annotated[str, IdOf("note")]`.

    The OpenAPI document shows its form; only the service checks it.
    """

    prefix: str

    @property
    def _form(self) -> str:
        return f"{self.prefix}_[0-9a-z]{{20,32}}"

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        shape = re.compile(self._form)

        def check(value: str, info: core_schema.ValidationInfo) -> str:
            # `fullmatch`, since `$` would let a line break at the end pass.
            if info.context == SERVICE and not shape.fullmatch(value):
                forms = " or ".join(f"{one}_<id>" for one in self.prefix.strip("()").split("|"))
                raise ValueError(f"must be an id of the form {forms}")
            return value

        return core_schema.with_info_after_validator_function(check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{self._form}$"}


JobId = Annotated[str, IdOf("ft")]
DatasetId = Annotated[str, IdOf("ds")]
DeploymentId = Annotated[str, IdOf("dep")]
EndpointId = Annotated[str, IdOf("ep")]
CanaryEndpointId = Annotated[str, IdOf("cep")]
AnyEndpointId = Annotated[str, IdOf("c?ep")]
WebhookId = Annotated[str, IdOf("wh")]
EventId = Annotated[str, IdOf("evt")]
BatchId = Annotated[str, IdOf("batch")]
EvaluationId = Annotated[str, IdOf("evl")]
ReleaseId = Annotated[str, IdOf("rel")]
EvalId = Annotated[str, IdOf("eval")]
DeploymentOrEvaluationId = Annotated[str, IdOf("(dep|evl)")]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]{0,127}$")]
ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
# Base ids hold no `:` and at most one `/`; fine-tuned ids are `ft:<base>:<name>:<suffix>` (§1).
ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,255}$")]

# Text without control characters: it can forge no line of a log and no row of a table.
ONE_LINE = r"^[^\x00-\x1f\x7f]*$"
TagKey = Annotated[str, Field(min_length=1, max_length=128, pattern=ONE_LINE)]
TagValue = Annotated[str, Field(max_length=512, pattern=ONE_LINE)]
Tags = Annotated[dict[TagKey, TagValue], Field(max_length=64)]


class SignedInPerson(Reply):
    """Somebody who signed in to the console by OpenID Connect; `subject` is the issuer's id of the person."""

    issuer: str
    subject: str
    name: str


# A name that reads as it is written: none of its characters controls a terminal or turns the order of a line around.
READS_AS_WRITTEN = r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]*$"
# Who has decided about a rollout or a release, and why: no free text, which may name a patient.
PersonName = Annotated[str, Field(min_length=1, max_length=200, pattern=READS_AS_WRITTEN)]
DecisionReason = Literal["evidence", "clinical_review", "safety", "operations", "other"]
Ticket = Annotated[str, Field(pattern=r"^[A-Z0-9-]{1,32}$")]

# What the databases can hold.
Int64 = Annotated[int, Field(le=2**63 - 1)]


def count(value: int, one: str, many: str | None = None) -> str:
    """How many there are of something: `1 job`, `2 jobs`."""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def render_time(moment: datetime) -> str:
    """The time as `YYYY-MM-DDThh:mm:ssZ` (§1)."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def render_time_ms(moment: datetime) -> str:
    """The time with milliseconds, as in log entries."""
    text = moment.astimezone(UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


_WRITTEN = WithJsonSchema({"type": "string", "format": "date-time"}, mode="serialization")
Timestamp = Annotated[datetime, PlainSerializer(render_time, when_used="json"), _WRITTEN]
TimestampMs = Annotated[datetime, PlainSerializer(render_time_ms, when_used="json"), _WRITTEN]


class Deleted(Reply):
    """The answer to a delete."""

    id: str
    deleted: Literal[True] = True


class Pagination(Reply):
    """The envelope of offset-paged lists (§8); `next_offset` is null on the last page.

    An offset beyond the end gives an empty page. A value out of range is refused (422), never replaced by another one.
    """

    total: int
    limit: int
    offset: int
    next_offset: int | None


Limit = Annotated[int, Field(ge=1, le=100, description="Entries in one page, 1 to 100.")]
LogLimit = Annotated[int, Field(ge=1, le=1000, description="Entries in one page, 1 to 1000.")]
Offset = Annotated[
    int, Field(ge=0, le=2**63 - 1, description="Entries skipped before the page starts.")
]
