"""Makes the context of an operation's call from the request that it came with."""

from ipaddress import ip_address
from typing import Any

from starlette.requests import Request

from tuneship.contract.declaring.operation import Operation
from tuneship.service.access.api_keys import Principal
from tuneship.service.access.audit_facts import AuditFacts
from tuneship.service.access.hipaa import Caller
from tuneship.service.context.context import Context
from tuneship.service.http.boundary import Boundary
from tuneship.service.http.forwarding import is_address_known, is_scheme_known, plain_address
from tuneship.store.records.audit import NOBODY, AuditRecord


def address_of(request: Request) -> str:
    """The address that the request came from; empty when a proxy names something that is no address."""
    return plain_address(request.client.host if request.client else "")


def record_failure(boundary: Boundary, request: Request) -> None:
    """Record a refused key, but nothing of the key: a guess may be somebody's key."""
    parts, request_id = boundary.parts, request.state.request_id
    refused = (NOBODY, "", "authenticate", None, 401, address_of(request), request_id)
    with parts.database.write_beside() as connection:
        parts.audit.add(connection, AuditRecord(parts.clock(), *refused))


def is_local(boundary: Boundary, request: Request) -> bool:
    """Whether a request came from the service's own machine, as far as this can be known.

    In a cluster there always is a proxy in between, which may have been reached from elsewhere.
    """
    address = address_of(request)
    is_alone = boundary.parts.settings.cluster is None
    is_loopback = is_alone and bool(address) and ip_address(address).is_loopback
    return is_loopback and is_scheme_known(request.scope)


def is_private(boundary: Boundary, request: Request) -> bool:
    """Whether a request came over TLS or from the service's own machine."""
    is_tls = request.scope["scheme"] == "https" and is_scheme_known(request.scope)
    return is_tls or is_local(boundary, request)


def context_of(
    boundary: Boundary, operation: Operation[..., Any], request: Request, identifier: str | None
) -> Context:
    """The context of a call that the request's principal makes; `identifier` is the id in the operation's path."""
    principal: Principal = request.state.principal
    return Context(
        parts=boundary.parts,
        client_id=principal.client_id,
        request_id=request.state.request_id,
        if_match=request.headers.get("if-match"),
        routing_key=request.headers.get("x-routing-key"),
        last_event_id=request.headers.get("last-event-id"),
        scopes=principal.scopes,
        accept=request.headers.get("accept", ""),
        caller=Caller(
            is_private=is_private(boundary, request),
            is_address_known=is_address_known(request.scope),
            key_lifetime=principal.lifetime,
        ),
        audit_facts=AuditFacts(
            key_id=principal.key_id,
            person=principal.person,
            address=address_of(request),
            action=operation.name,
            is_change=operation.is_change,
            path_id=None if identifier is None else request.state.dialect.stored_id(identifier),
        ),
    )
