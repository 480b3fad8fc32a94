"""A service with sockets, a deployment, a tuned model and an endpoint of a name that programs ask for."""

from collections.abc import Iterator

import openai
import pytest

from tests.support.in_process import Service
from tests.support.openai_clients import blocking

ENDPOINT = "gpt-4o-mini"


@pytest.fixture(scope="session")
def answering(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with Service(tmp_path_factory.mktemp("openai"), allow_fault_injection=True) as service:
        service.endpoint(ENDPOINT, service.deployment("answers"))
        service.listen()
        yield service


@pytest.fixture(scope="session")
def client(answering: Service) -> Iterator[openai.OpenAI]:
    with blocking(answering) as made:
        yield made
