"""Clients of the `openai` package that call a service in this process through a socket, or a service process."""

from typing import Any

import openai

from tests.support.service.in_process import Service
from tests.support.service.processes import Serve


def key_of(service: Service, client: str = "alice") -> str:
    return service.headers[client]["Authorization"].removeprefix("Bearer ")


def options_of(service: Service, client: str = "alice") -> dict[str, Any]:
    return {
        "base_url": f"{service.url}/openai/v1",
        "api_key": key_of(service, client),
        "max_retries": 0,
        "timeout": 60,
        # Every answer must fit the client's own types; normally it would not look.
        "_strict_response_validation": True,
    }


def blocking(service: Service, client: str = "alice", **more: Any) -> openai.OpenAI:
    return openai.OpenAI(**(options_of(service, client) | more))


def of_process(serve: Serve) -> openai.OpenAI:
    found = serve.openai_variables()
    return openai.OpenAI(
        base_url=found["OPENAI_BASE_URL"], api_key=found["OPENAI_API_KEY"], timeout=300
    )


def asynchronous(service: Service, client: str = "alice") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(**options_of(service, client))


def bare_headers(service: Service, client: str = "alice") -> dict[str, str]:
    return {"Authorization": service.headers[client]["Authorization"]}
