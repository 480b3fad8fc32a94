"""Anybody may ask whether the process lives and whether it can serve requests now."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy import event

from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.in_process import Lines, Service

both_databases = pytest.mark.both_databases


def status(service: Service, path: str) -> int:
    return service.call("GET", path, None).status_code


def refuse_writes(connection: sa.Connection) -> None:
    """Let the database refuse writes, as on a disk mounted read-only or on a standby of Postgres."""
    is_sqlite = connection.dialect.name == "sqlite"
    connection.exec_driver_sql("PRAGMA query_only=1" if is_sqlite else "set transaction read only")


@contextmanager
def database_that_takes_no_writes(service: Service) -> Iterator[None]:
    service.rest()  # otherwise the supervisor would complain
    engine = service.database.engine
    event.listen(engine, "begin", refuse_writes)
    try:
        yield
    finally:
        event.remove(engine, "begin", refuse_writes)
        engine.dispose()


@both_databases
def test_a_service_that_cannot_write_is_alive_and_not_ready(service: Service) -> None:
    assert status(service, "/readyz") == 200
    body = {"model_name": "tuneship-tiny", "deployment_name": "new"}
    with database_that_takes_no_writes(service):
        assert service.call("POST", "/v1/deployments", json=body).status_code == 503
        service.until(lambda: status(service, "/readyz") == 503)
        refused = service.call("GET", "/readyz", None)
        assert refused.json()["error"]["code"] == "internal_error"
        assert int(refused.headers["retry-after"]) >= 1
        assert status(service, "/healthz") == 200
    service.until(lambda: status(service, "/readyz") == 200)
    assert service.call("POST", "/v1/deployments", json=body).status_code == 201


@both_databases
def test_frequent_health_checks_cause_one_write_a_second(service: Service) -> None:
    service.limit(ready_for_s=3600.0)
    service.rest()
    begun: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        begun.append(statement)

    async def ask() -> set[int]:
        transport = httpx.ASGITransport(service.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service.test") as http:
            answers = await asyncio.gather(*(http.get("/readyz") for _ in range(300)))
            return {one.status_code for one in answers}

    event.listen(service.database.engine, "before_cursor_execute", note)
    assert service.run(ask()) == {200}
    assert len([one for one in begun if one.startswith("update")]) == 1


def test_the_log_says_once_that_a_service_is_not_ready(service: Service) -> None:
    lines = Lines()
    lines.setLevel(logging.WARNING)
    logging.getLogger("tuneship").addHandler(lines)
    try:
        with database_that_takes_no_writes(service):
            service.until(lambda: status(service, "/readyz") == 503)
            for _ in range(50):
                assert status(service, "/readyz") == 503
    finally:
        logging.getLogger("tuneship").removeHandler(lines)
    assert len([one for one in lines.texts if "not ready" in one]) == 1


def test_a_service_that_drains_is_alive_and_not_ready(service: Service) -> None:
    assert status(service, "/readyz") == 200
    service.loop.call_soon_threadsafe(service.parts.drain.begin)
    service.until(lambda: status(service, "/readyz") == 503)
    assert status(service, "/healthz") == 200


@pytest.mark.postgres
def test_without_its_database_server_a_service_is_alive_and_not_ready(
    start: Callable[..., Service], postgres: Cluster
) -> None:
    url = postgres.new_database()
    service = start(database_url=url)
    assert status(service, "/readyz") == 200
    postgres.refuse(url, refuses=True)
    try:
        service.until(lambda: status(service, "/readyz") == 503)
        assert status(service, "/healthz") == 200
    finally:
        postgres.refuse(url, refuses=False)
    service.until(lambda: status(service, "/readyz") == 200)
