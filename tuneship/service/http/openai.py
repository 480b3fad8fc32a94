"""OpenAI's API as a dialect: who asks, what an error looks like, which headers are sent."""

import re
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request

from tuneship.contract.errors import ApiError, AuthenticationError
from tuneship.contract.openai import declaring
from tuneship.contract.openai.declaring import PREFIX
from tuneship.contract.openai.ids import own_id
from tuneship.service.http.dialect import Dialect
from tuneship.service.http.rate_limits import RateWindow
from tuneship.service.openai.errors import INVALID, OpenAIError, openai_error

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


def _credentials(request: Request) -> tuple[list[str], list[str] | None]:
    # Azure's clients send the key alone.
    keys = [f"Bearer {key}" for key in request.headers.getlist("api-key")]
    given = request.headers.getlist("authorization") or keys
    return given, request.headers.getlist("x-client-id") or None


def _check_client(request: Request, client_id: str) -> None:
    for name, variable in TENANT_HEADERS.items():
        if any(value != client_id for value in request.headers.getlist(name)):
            text = f"{name} does not match the client of the API key: unset {variable}, or set it to the client id"
            raise AuthenticationError(text, param=name)


def _retry_count(request: Request) -> int | None:
    """The earlier tries of a request, which OpenAI's clients number: they send no idempotency key."""
    count = request.headers.get("x-stainless-retry-count", "")
    return int(count) if RETRY_COUNT.fullmatch(count) else None


def _answer_headers(state: Mapping[str, Any], started: float) -> dict[str, str]:
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


def _own_error(request: Request, error: ApiError) -> ApiError:
    is_job_create = request.method == "POST" and request.scope["path"] == JOBS
    return openai_error(error, is_job_create=is_job_create)


OPENAI = Dialect(
    prefix=PREFIX,
    credentials=_credentials,
    check_client=_check_client,
    declared=declaring.OPENAI,
    generating=GENERATING,
    retry_count=_retry_count,
    stored_id=own_id,
    answer_headers=_answer_headers,
    own_error=_own_error,
    unknown_route=lambda: OpenAIError("Unknown request URL", 404, (INVALID, "unknown_url")),
)
