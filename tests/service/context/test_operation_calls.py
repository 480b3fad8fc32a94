"""An operation that is called within the service is as safe as one that is called over HTTP."""

import asyncio
from contextlib import nullcontext

import pytest

from tests.support.service.in_process import Service
from tuneship.contract.endpoints import EndpointCreate
from tuneship.contract.errors import PermissionDenied
from tuneship.service.access.audit_facts import AuditFacts
from tuneship.service.all_handlers import SERVED
from tuneship.service.context.context import Context
from tuneship.service.context.operation_calls import Arguments, OperationCalls, WholeAnswer
from tuneship.service.context.request_slots import RequestSlots
from tuneship.store.records import audit
from tuneship.store.records.idempotency import Key

CREATE = SERVED["create_endpoint"]


async def stay() -> None:
    await asyncio.Event().wait()


def create(service: Service, arguments: Arguments, *scopes: str) -> WholeAnswer:
    context = Context(
        service.parts,
        "alice",
        "req_1",
        scopes=frozenset(scopes),
        audit_facts=AuditFacts(action="create_endpoint", is_change=True),
    )
    calls = OperationCalls(CREATE, service.keys, RequestSlots())
    answer = service.run(calls.carry_out(context, nullcontext(arguments), stay))
    assert isinstance(answer, WholeAnswer)
    return answer


def endpoint(service: Service) -> dict[str, EndpointCreate]:
    return {"endpoint": EndpointCreate(name="e", deployment_id=service.deployment("first"))}


def audited(service: Service) -> list[tuple[str, str | None, int]]:
    service.parts.audit.link_all(service.database)
    with service.database.read() as connection:
        rows = audit.rows_of(connection, client_id="alice")
        return [(row["action"], row["resource_id"], row["status"]) for row in rows]


def test_a_call_is_refused_without_its_scope_and_written_down(service: Service) -> None:
    with pytest.raises(PermissionDenied):
        create(service, Arguments(endpoint(service)), "endpoints:read")
    assert audited(service)[-1] == ("create_endpoint", None, 403)
    assert service.call("GET", "/v1/endpoints").json()["endpoints"] == []


def test_a_call_that_is_repeated_with_its_key_acts_once(service: Service) -> None:
    arguments = Arguments(endpoint(service), Key("alice", "double click", "the same form"))
    first, again = (create(service, arguments, "endpoints:write") for _ in range(2))
    (made,) = service.call("GET", "/v1/endpoints").json()["endpoints"]
    assert first.body == again.body
    assert CREATE.operation.reply_type.validate_json(again.body).id == made["id"]
    assert audited(service)[-2] == ("create_endpoint", made["id"], 201)
