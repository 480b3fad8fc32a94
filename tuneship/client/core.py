"""The core of both clients: a generator that yields requests and pauses and is told answers.

It knows retries, errors and replies, and no I/O. Next: `clients.py`, the few lines that obey it.
"""

import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar
from urllib.parse import unquote

import httpx
from pydantic import ValidationError

from tuneship.contract.errors import (
    BadResponse,
    ModelNotFound,
    ResourceNotFound,
    ServiceUnreachable,
    error_from_answer,
)
from tuneship.contract.operation import Call, Operation
from tuneship.contract.retry_after import seconds_to_wait

P = ParamSpec("P")
R = TypeVar("R")

RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
LONGEST_PAUSE_S = 30.0
LONGEST_RETRY_AFTER_S = 300.0
# Together as long as the service keeps a key for a request that does not end.
PAUSES_WHILE_BUSY_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)


@dataclass(frozen=True)
class Pause:
    """The core asks to be called again after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class HttpAnswer:
    """What came back: an HTTP answer, or the reason why none came."""

    response: httpx.Response | None = None
    failure: httpx.HTTPError | httpx.InvalidURL | None = None


Conversation = Generator[Call | Pause, HttpAnswer | None, R]


def converse(
    operation: Operation[P, R], call: Call, tries: int, draw: Callable[[], float]
) -> Conversation[R]:
    """Send `call` up to `tries` times and return the reply, or raise what the last try brought.

    `draw` gives a number in [0, 1) for the jitter (full jitter, 0.5 s to 30 s; a `Retry-After` wins). A DELETE whose
    answer was lost has succeeded when its repeat finds nothing: both times the caller gets what was asked for.
    """
    failure: Exception | None = None
    may_be_deleted = False
    for attempt in range(1, tries + 1):
        answer = yield from _answered(call)
        failure, pause = judge(operation, answer)
        if may_be_deleted and isinstance(failure, ResourceNotFound | ModelNotFound):
            return _deleted(operation, call)
        may_be_deleted |= call.method == "DELETE" and _may_have_been_obeyed(answer)
        if failure is None and answer.response is not None:
            if attempt == tries or call.method != "GET" or _is_json(answer.response):
                return _reply(operation, answer.response)
            failure = BadResponse(f"{operation.name}: the answer is not JSON", retryable=True)
            pause = 0.0
        if pause is None or attempt == tries or failure is None:
            break
        if call.file is not None:
            call.file.seek(0)
        yield Pause(backoff(pause, attempt, draw))
    raise failure or BadResponse(f"{operation.name}: no answer")


def _answered(call: Call) -> Conversation[HttpAnswer]:
    """Send the call; while the service is still at an earlier try of it, wait for that one's answer.

    To give up instead would let the caller begin a new call, with a new key, of what is being done already.
    """
    pauses = iter(PAUSES_WHILE_BUSY_S)
    while True:
        answer = yield call
        if answer is None:
            raise RuntimeError("a request was yielded and no answer was sent")
        seconds = next(pauses, None) if _is_still_busy(call, answer) else None
        if seconds is None:
            return answer
        yield Pause(seconds)
        if call.file is not None:
            call.file.seek(0)


def _is_still_busy(call: Call, answer: HttpAnswer) -> bool:
    response = answer.response
    return (
        call.idempotency_key is not None
        and response is not None
        and response.status_code == 409
        and response.headers.get("x-should-retry") == "true"
    )


def _may_have_been_obeyed(answer: HttpAnswer) -> bool:
    """Whether the service may have acted although its answer did not come through."""
    if answer.response is not None:
        return answer.response.status_code in (502, 504)  # of a proxy
    never_sent = httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout
    return not isinstance(answer.failure, never_sent)


def _deleted(operation: Operation[..., R], call: Call) -> R:
    """The reply that was lost, as far as anybody needs it; its fields are those of every reply to a DELETE."""
    identifier = unquote(call.path.rpartition("/")[2])
    fields = {"id": identifier, "deleted": True, "status": "deleted"}
    return operation.reply_type.validate_python(fields)


def backoff(pause: float, failures: int, draw: Callable[[], float]) -> float:
    """Seconds to wait: what the answer asked for, else a random part of a span that doubles with each failure."""
    return pause if pause > 0 else max(0.05, draw() * min(LONGEST_PAUSE_S, 0.5 * 2**failures))


def judge(
    operation: Operation[..., Any], answer: HttpAnswer
) -> tuple[Exception | None, float | None]:
    """The failure in an answer, and the pause before another try: None = do not, 0 = the usual back-off."""
    if answer.response is None:
        may_pass = not _is_certain(answer.failure)
        message = f"{operation.name}: no answer ({type(answer.failure).__name__})"
        return ServiceUnreachable(message, retryable=may_pass), 0.0 if may_pass else None
    response = answer.response
    if response.is_success:
        return None, None
    error = error_from_answer(response.status_code, _decoded(response))
    error.headers = dict(response.headers)
    should = response.headers.get("x-should-retry")
    error.retryable = (
        should == "true"
        if should in ("true", "false")
        else response.status_code in RETRIED_STATUS and error.code != "quota_exceeded"
    )
    waited = retry_after_seconds(response.headers.get("retry-after"), datetime.now(UTC))
    error.retry_after = None if waited is None else round(waited)
    return error, (waited or 0.0) if error.retryable else None


def _is_certain(failure: Exception | None) -> bool:
    """Whether another try must fail too: the address is wrong, or TLS does not come about."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, ssl.SSLError | httpx.UnsupportedProtocol | httpx.InvalidURL):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def retry_after_seconds(value: str | None, now: datetime) -> float | None:
    """Capped, so that a wrong server cannot park a pipeline for days."""
    seconds = seconds_to_wait(value, now)
    return None if seconds is None else min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)


def _is_json(response: httpx.Response) -> bool:
    """A reading that was cut short is worth another try."""
    try:
        response.json()
    except ValueError:
        return False
    return True


def _decoded(response: httpx.Response) -> object:
    try:
        return response.json()
    except ValueError:
        return None


def _reply(operation: Operation[..., R], response: httpx.Response) -> R:
    try:
        return operation.reply_type.validate_json(response.content, extra="ignore")
    except ValidationError as error:
        places = sorted({".".join(str(part) for part in one["loc"]) for one in error.errors()})
        named = ", ".join(places[:5]) or "body"
        message = f"{operation.name}: the answer is not readable at: {named}"
        raise BadResponse(message, retryable=not _is_json(response)) from None
