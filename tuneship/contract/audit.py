"""The audit log on the wire (additive): who did what to which resource of this tenant, with what outcome.

Changes are always in it. With `security_settings.audit_logging` a job's or deployment's reads, generations and refusals
are in it, too, each committed before its answer is sent. Entries hold ids, counts and the service's own words; no text.
"""

from typing import Annotated, Literal

from pydantic import Field

from tuneship.contract.common import LogCursor, LogLimit, Reply, SignedInPerson, TimestampMs
from tuneship.contract.declaring.examples import NOON, NOON_MS, REQUEST, SUFFIX
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.pages import by_after
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, Verb
from tuneship.contract.errors import ResourceNotFound


class AuditEntry(Reply):
    """One answer of the service. `seq` numbers the rows of all tenants; `key_id` is the public part of the API key.

    A person who signed in by OpenID Connect has a key, too, whose secret nobody holds.

    Generations have token counts. A streamed one has two entries: one at its start, one with the counts at its end.
    """

    seq: int
    at: TimestampMs
    key_id: str
    action: str
    resource_id: str | None
    status: int
    address: str
    request_id: str
    prompt_tokens: int | None
    completion_tokens: int | None
    person: SignedInPerson | None = None


class AuditPage(Reply):
    """Entries, oldest first unless the caller asked for the newest."""

    entries: list[AuditEntry]
    pagination: LogCursor


class AuditHead(Reply):
    """A signed head of the audit chain of all tenants: number and signature of one row, and so of all rows up to it.

    Ed25519 signs the first three fields, each on a line of its own. Bytes are in hexadecimal.
    """

    seq: int
    mac: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    at: Annotated[str, Field(description="When it was signed, as it was signed.")]
    signature: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]
    public_key: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


def signed_text(seq: int, mac: str, at: str) -> bytes:
    """The bytes of a head that are signed."""
    return f"{seq}\n{mac}\n{at}".encode()


@operation(
    "GET",
    "/v1/audit",
    scope="audit:read",
    example=Example(
        reply={
            "entries": [
                {
                    "seq": 4711,
                    "at": NOON_MS,
                    "key_id": "9f2c41d7",
                    "action": "generate",
                    "resource_id": f"dep_{SUFFIX}",
                    "status": 200,
                    "address": "10.1.4.20",
                    "request_id": REQUEST,
                    "prompt_tokens": 57,
                    "completion_tokens": 12,
                    "person": None,
                }
            ],
            "pagination": {"after": "NDcxMQ"},
        }
    ),
)
def list_audit(
    limit: LogLimit = 100, after: str | None = None, order: Literal["asc", "desc"] = "asc"
) -> AuditPage:
    """List the actions in this tenant's name, oldest first (additive). Entries are never removed.

    With `order=desc` the newest come first. A token belongs to its order: with the other one it is 422.
    """
    raise NotImplementedError


@operation(
    "GET",
    "/v1/audit/head",
    scope="audit:read",
    errors=(ResourceNotFound,),
    example=Example(
        reply={
            "seq": 4711,
            "mac": "5f" * 32,
            "at": NOON,
            "signature": "3a" * 64,
            "public_key": "c4" * 32,
        }
    ),
)
def get_audit_head(
    seq: Annotated[
        int | None, Field(ge=1, description="The number of a row; default: the last.")
    ] = None,
) -> AuditHead:
    """Sign the last row of the audit chain now, or a row by its number (additive)."""
    raise NotImplementedError


class Audit(Resource[C_co]):
    """Who did what in this tenant's name."""

    head = Verb(get_audit_head)
    list = Verb(list_audit)
    iterate = Pages(list_audit, lambda page: page.entries, by_after)
