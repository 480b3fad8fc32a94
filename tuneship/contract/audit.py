"""The audit log on the wire (additive): who did what to which resource of this tenant, with what outcome.

Changes are always in it. With `security_settings.audit_logging` a job's or deployment's reads, generations and refusals
are in it, too, each committed before its answer is sent. Entries hold ids, counts and the service's own words; no text.
"""

from tuneship.contract.common import LogCursor, LogLimit, Reply, TimestampMs
from tuneship.contract.declaring.examples import NOON_MS, REQUEST, SUFFIX
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.pages import by_after
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, Verb


class AuditEntry(Reply):
    """One answer of the service. `seq` numbers the rows of all tenants; `key_id` is the public part of the API key.

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


class AuditPage(Reply):
    """Entries, oldest first."""

    entries: list[AuditEntry]
    pagination: LogCursor


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
                }
            ],
            "pagination": {"after": "NDcxMQ"},
        }
    ),
)
def list_audit(limit: LogLimit = 100, after: str | None = None) -> AuditPage:
    """List the actions in this tenant's name, oldest first (additive). Entries are never removed."""
    raise NotImplementedError


class Audit(Resource[C_co]):
    """Who did what in this tenant's name."""

    list = Verb(list_audit)
    iterate = Pages(list_audit, lambda page: page.entries, by_after)
