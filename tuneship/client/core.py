"""The core of both clients: a generator that yields requests and pauses, and receives answers.

It decides about retries, errors and replies, and does no I/O. Next: `clients.py`, which carries out its steps.
"""

import ssl
from collections.abc import Callable, Generator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar, cast
from urllib.parse import unquote

import httpx
from pydantic import ValidationError

from tuneship.contract.declaring.operation import Call, Operation
from tuneship.contract.declaring.retry_after import seconds_to_wait
from tuneship.contract.errors import (
    BadResponse,
    ModelNotFound,
    ResourceNotFound,
    ServiceUnreachable,
    error_from_answer,
)

P = ParamSpec("P")
R = TypeVar("R")

# After these a retry must fail, too: the address is wrong, or there is no TLS connection.
CERTAIN_FAILURES = (ssl.SSLError, httpx.UnsupportedProtocol, httpx.InvalidURL)
RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
LONGEST_PAUSE_S = 30.0
# The service never asks for more than 120 s; what lies in between is left to proxies.
LONGEST_RETRY_AFTER_S = 300.0
# Added up, they are as long as the service reserves an idempotency key for an unfinished request.
PAUSES_WHILE_BUSY_S = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)


@dataclass(frozen=True)
class Pause:
    """A step: wait for this many seconds."""

    seconds: float


@dataclass(frozen=True)
class HttpAnswer:
    """The result of a request: an HTTP answer, or the reason why none came."""

    response: httpx.Response | None = None
    failure: httpx.HTTPError | httpx.InvalidURL | None = None

    @property
    def may_have_been_carried_out(self) -> bool:
        """Whether the service may have acted although its answer did not come through."""
        if self.response is not None:
            return self.response.status_code in (502, 504)  # a proxy lost the service's answer
        never_sent = httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout
        return not isinstance(self.failure, never_sent)


Conversation = Generator[Call | Pause, HttpAnswer | None, R]


def converse(
    operation: Operation[P, R], call: Call, tries: int, draw: Callable[[], float]
) -> Conversation[R]:
    """Send `call` up to `tries` times and return the reply, or raise the error of the last try.

    `draw` returns a number in [0, 1) for the jitter (full jitter, 0.5 s to 30 s; a `Retry-After` takes precedence). A
    DELETE whose answer was lost has succeeded when its retry finds nothing.
    """
    failure: Exception | None = None
    may_be_deleted = False
    for attempt in range(1, tries + 1):
        answer = yield from _answered(call)
        failure, pause = judge(operation, answer)
        if may_be_deleted and isinstance(failure, ResourceNotFound | ModelNotFound):
            # An earlier try has deleted it, and its reply was lost. Replies to a DELETE have these fields.
            identifier = unquote(call.path.rpartition("/")[2])
            fields = {"id": identifier, "deleted": True, "status": "deleted"}
            return operation.reply_type.validate_python(fields)
        may_be_deleted |= call.method == "DELETE" and answer.may_have_been_carried_out
        # A read that was cut short is read again; a change is not repeated for the sake of its answer.
        if failure is None and answer.response is not None:
            # An archive whose length was announced cannot be short: httpx would have failed.
            is_read = operation.is_text or operation.is_download or _is_json(answer.response)
            if attempt == tries or call.method != "GET" or is_read:
                return _reply(operation, answer.response)
            failure = BadResponse(f"{operation.name}: the answer is not JSON", retryable=True)
            pause = 0.0
        if pause is None or attempt == tries or failure is None:
            break
        # The try before has read the file, perhaps to its end, or written a part of its answer.
        if call.file is not None:
            call.file.seek(0)
        if call.sink is not None:
            call.sink.seek(0)
            call.sink.truncate()
        yield Pause(backoff(pause, attempt, draw))
    raise failure or BadResponse(f"{operation.name}: no answer")


def _answered(call: Call) -> Conversation[HttpAnswer]:
    """Send the call, and send it again while the service is still working on an earlier try.

    Giving up instead would make the caller start a new call, with a new key, of work that is being done already.
    """
    pauses = iter(PAUSES_WHILE_BUSY_S)
    while True:
        answer = yield call
        if answer is None:
            raise RuntimeError("a request was yielded, but no answer was sent back")
        response = answer.response
        is_still_busy = (
            call.idempotency_key is not None
            and response is not None
            and response.status_code == 409
            and response.headers.get("x-should-retry") == "true"
        )
        seconds = next(pauses, None) if is_still_busy else None
        if seconds is None:
            return answer
        yield Pause(seconds)
        if call.file is not None:
            call.file.seek(0)


def backoff(pause: float, failures: int, draw: Callable[[], float]) -> float:
    """Seconds to wait: the pause that the answer requires, else a random part of a span that doubles each time."""
    # Full jitter, so that clients which failed together do not come back together.
    return pause if pause > 0 else max(0.05, draw() * min(LONGEST_PAUSE_S, 0.5 * 2**failures))


def judge(
    operation: Operation[..., Any], answer: HttpAnswer
) -> tuple[Exception | None, float | None]:
    """The error in an answer, and the seconds to wait before a retry: None is no retry, 0 the usual backoff."""
    if answer.response is None:
        # httpx names what it was doing; a wrong address or certificate is a cause beneath, and stays.
        cause: BaseException | None = answer.failure
        while cause is not None and not isinstance(cause, CERTAIN_FAILURES):
            cause = cause.__cause__ or cause.__context__
        may_pass = cause is None
        message = f"{operation.name}: no answer ({type(answer.failure).__name__})"
        return ServiceUnreachable(message, retryable=may_pass), 0.0 if may_pass else None
    response = answer.response
    if response.is_success:
        return None, None
    error = error_from_answer(response.status_code, response.json() if _is_json(response) else None)
    error.headers = dict(response.headers)
    should = response.headers.get("x-should-retry")
    # The service knows best; a proxy says nothing, so its status decides.
    error.retryable = (
        should == "true"
        if should in ("true", "false")
        else response.status_code in RETRIED_STATUS and error.code != "quota_exceeded"
    )
    waited = retry_after_seconds(response.headers.get("retry-after"), datetime.now(UTC))
    error.retry_after = None if waited is None else round(waited)
    return error, (waited or 0.0) if error.retryable else None


def retry_after_seconds(value: str | None, now: datetime) -> float | None:
    """Seconds of a `Retry-After` header, capped so that a faulty server cannot stop a pipeline for days."""
    seconds = seconds_to_wait(value, now)
    return None if seconds is None else min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)


def _is_json(response: httpx.Response) -> bool:
    """Whether the body is whole JSON; one that was cut short is worth a retry."""
    try:
        response.json()
    except ValueError:
        return False
    return True


def _reply(operation: Operation[..., R], response: httpx.Response) -> R:
    if operation.is_text:
        return operation.reply_type.validate_python(response.text)
    if operation.is_download:
        return cast("R", response.content)
    try:
        return operation.reply_type.validate_json(response.content, extra="ignore")
    except ValidationError as error:
        # Names of fields only: the values may be a patient's text.
        places = sorted({".".join(str(part) for part in one["loc"]) for one in error.errors()})
        named = ", ".join(places[:5]) or "body"
        message = f"{operation.name}: the answer is not readable at: {named}"
        raise BadResponse(message, retryable=not _is_json(response)) from None
