"""A service with sockets, a deployment, a tuned model and an endpoint of a name that programs ask for."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.openai.openai_clients import blocking
from tests.support.service.in_process import Service
from tests.support.service.service_fixtures import DatabaseSettings

ENDPOINT = "gpt-4o-mini"


@pytest.fixture(scope="session")
def answering(
    tmp_path_factory: pytest.TempPathFactory, database_settings: DatabaseSettings
) -> Iterator[Service]:
    options: dict[str, Any] = {"allow_fault_injection": True, **database_settings()}
    with Service(tmp_path_factory.mktemp("openai"), **options) as service:
        service.endpoint(ENDPOINT, service.deployment("answers"))
        service.listen()
        yield service


@pytest.fixture(scope="session")
def client(answering: Service) -> Iterator[openai.OpenAI]:
    with blocking(answering) as made:
        yield made
