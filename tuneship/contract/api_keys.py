"""API keys on the wire (additive): their public parts. `tuneship keys` makes, rotates and revokes them on the host."""

from tuneship.contract.common import Limit, Offset, Pagination, Reply, Timestamp
from tuneship.contract.declaring.examples import LATER, NOON, PAGE
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.verbs import C_co, Pages, Resource, Verb


class ApiKey(Reply):
    """A key without its secret. `id` is its public part, the eight characters behind `tsk_`."""

    id: str
    scopes: list[str]
    created_at: Timestamp
    expires_at: Timestamp | None
    revoked_at: Timestamp | None
    last_used_at: Timestamp | None


class ApiKeyPage(Reply):
    """One page of keys, newest first."""

    api_keys: list[ApiKey]
    pagination: Pagination


@operation(
    "GET",
    "/v1/api-keys",
    scope="keys:admin",
    example=Example(
        reply={
            "api_keys": [
                {
                    "id": "9f2c41d7",
                    "scopes": ["jobs:read", "jobs:write"],
                    "created_at": NOON,
                    "expires_at": LATER,
                    "revoked_at": None,
                    "last_used_at": NOON,
                }
            ],
            "pagination": PAGE,
        }
    ),
)
def list_api_keys(limit: Limit = 20, offset: Offset = 0) -> ApiKeyPage:
    """List the keys of this tenant, newest first, without their secrets (additive)."""
    raise NotImplementedError


class ApiKeys(Resource[C_co]):
    """API keys, without their secrets."""

    list = Verb(list_api_keys)
    iterate = Pages(list_api_keys, lambda page: page.api_keys)
