"""Fixtures that the service tests use, from `tests/support/service/service_fixtures.py`."""

from tests.support.service.service_fixtures import database, service, shared, start, tenants, world

__all__ = ["database", "service", "shared", "start", "tenants", "world"]
