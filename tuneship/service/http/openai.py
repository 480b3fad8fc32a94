"""How the boundary treats requests below `/openai/v1`: who asks, what a refusal looks like, which headers are sent."""

import re
import time
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request

from tuneship.contract.errors import ApiError, AuthenticationError
from tuneship.contract.openai.declaring import PREFIX
from tuneship.contract.openai.ids import own_id
from tuneship.service.http.rate_limits import RateWindow
from tuneship.service.openai.refusals import INVALID, OpenAIRefusal, openai_refusal

VERSION = "2020-10-01"
RETRY_COUNT = re.compile(r"[0-9]{1,4}")
JOBS = f"{PREFIX}fine_tuning/jobs"
GENERATING = tuple(
    PREFIX + one for one in ("chat/completions", "completions", "responses", "embeddings")
)
# The headers that may name the client, and the variables from which OpenAI's clients take them.
TENANT_HEADERS = {
    "OpenAI-Organization": "OPENAI_ORG_ID",
    "OpenAI-Project": "OPENAI_PROJECT_ID",
}


def is_openai(scope: Mapping[str, Any]) -> bool:
    """Whether a request is one of OpenAI's API."""
    return str(scope["path"]).startswith(PREFIX)


def in_its_form(scope: Mapping[str, Any], error: ApiError) -> ApiError:
    """The error in the form of the API that was called."""
    if not is_openai(scope):
        return error
    is_job_create = scope["method"] == "POST" and scope["path"] == JOBS
    return openai_refusal(error, is_job_create=is_job_create)


def no_such_route(error: ApiError) -> OpenAIRefusal:
    """The refusal of an address that no operation has, with OpenAI's code for it."""
    return OpenAIRefusal("Unknown request URL", error.status, (INVALID, "unknown_url"))


def retry_count(request: Request) -> int | None:
    """How often OpenAI's clients have sent this request before; they number their tries and send no key for them."""
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if is_openai(request.scope) and RETRY_COUNT.fullmatch(count) else None


def stored_id(scope: Mapping[str, Any], path: Mapping[str, str]) -> str | None:
    """The first id in a path as the audit chain records it, in the form of the main API."""
    identifier = next(iter(path.values()), None)
    if identifier is None or not is_openai(scope):
        return identifier
    return own_id(identifier)


def check_tenant(headers: Headers, client_id: str) -> None:
    """Raises `AuthenticationError` where a header names another client than the key's."""
    for name, variable in TENANT_HEADERS.items():
        if any(value != client_id for value in headers.getlist(name)):
            text = f"{name} does not match the client of the API key: unset {variable}, or set it to the client id"
            raise AuthenticationError(text, param=name)


def answer_headers(state: MutableMapping[str, Any], started: float) -> dict[str, str]:
    """The headers that OpenAI's clients read, beside those of the main API."""
    window: RateWindow | None = state.get("window")
    headers = {
        "openai-version": VERSION,
        "openai-processing-ms": str(round((time.perf_counter() - started) * 1000)),
    }
    if "principal" in state:
        headers["openai-organization"] = state["principal"].client_id
    if window is not None:
        headers |= {
            "x-ratelimit-limit-requests": str(window.limit),
            "x-ratelimit-remaining-requests": str(window.remaining),
            "x-ratelimit-reset-requests": f"{window.retry_after}s",
        }
    return headers
