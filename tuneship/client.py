"""The typed client: `client.jobs.create(JobCreate(...))`, sync (`Client`) and async (`AsyncClient`) from one core.

The core is a generator that yields requests and pauses and is told answers: it knows retries, errors and replies, and
no I/O. Each client is the few lines that obey it. What an operation is stands in `tuneship/contract/`.
"""

import asyncio
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Generic, ParamSpec, Self, TypeVar, overload

import httpx
from pydantic import ValidationError

from tuneship.contract import datasets, deployments, endpoints, generation, jobs, metrics, models
from tuneship.contract.errors import (
    ApiError,
    BadResponse,
    ServiceUnreachable,
    error_from_answer,
)
from tuneship.contract.operation import Call, Operation
from tuneship.settings import ClientSettings

P = ParamSpec("P")
R = TypeVar("R")

RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
LONGEST_PAUSE_S = 30.0
LONGEST_RETRY_AFTER_S = 300.0


@dataclass(frozen=True)
class Options:
    """What a caller may set for a call beside its arguments."""

    idempotency_key: str | None = None
    if_match: str | None = None
    routing_key: str | None = None
    tries: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class Pause:
    """The core asks to be called again after so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Answer:
    """What came back: an HTTP answer, or the reason why none came."""

    response: httpx.Response | None = None
    failure: httpx.HTTPError | httpx.InvalidURL | None = None


Conversation = Generator[Call | Pause, Answer | None, R]


def converse(
    operation: Operation[P, R], call: Call, tries: int, draw: Callable[[], float]
) -> Conversation[R]:
    """Send `call` up to `tries` times and return the reply, or raise what the last try brought.

    `draw` gives a number in [0, 1) for the jitter (full jitter, 0.5 s to 30 s; a `Retry-After` wins).
    """
    failure: Exception | None = None
    for attempt in range(1, tries + 1):
        answer = yield call
        if answer is None:
            raise RuntimeError("a request was yielded and no answer was sent")
        failure, pause = _judge(operation, answer)
        if failure is None and answer.response is not None:
            if attempt == tries or call.method != "GET" or _is_json(answer.response):
                return _reply(operation, answer.response)
            failure, pause = BadResponse(f"{operation.name}: the answer is not JSON"), 0.0
        if pause is None or attempt == tries or failure is None:
            break
        if call.file is not None:
            call.file.seek(0)
        backoff = draw() * min(LONGEST_PAUSE_S, 0.5 * 2**attempt)
        yield Pause(pause if pause > 0 else max(0.05, backoff))
    raise failure or BadResponse(f"{operation.name}: no answer")


def _judge(operation: Operation[..., Any], answer: Answer) -> tuple[Exception | None, float | None]:
    """The failure in an answer, and the pause before another try: None = do not, 0 = the usual back-off."""
    if answer.response is None:
        kind = type(answer.failure).__name__
        unreachable = ServiceUnreachable(f"{operation.name}: no answer ({kind})")
        return unreachable, None if _is_certain(answer.failure) else 0.0
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
    """Seconds or a date, as RFC 9110 allows; capped, so that a wrong server cannot park a pipeline for days."""
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value) - now).total_seconds()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_S)


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
        raise BadResponse(f"{operation.name}: the answer is not readable at: {named}") from None


class Verb(Generic[P, R]):
    """`jobs.create` and the like: an operation, callable on a client's resource."""

    def __init__(self, operation: Operation[P, R]) -> None:
        """Name the operation that the verb stands for."""
        self.operation = operation

    @overload
    def __get__(self, resource: "SyncResource", owner: type) -> Callable[P, R]: ...
    @overload
    def __get__(self, resource: "AsyncResource", owner: type) -> Callable[P, Awaitable[R]]: ...
    def __get__(self, resource: "SyncResource | AsyncResource", owner: type) -> Callable[P, Any]:
        """Bind to the resource's client."""
        client: Any = resource.client

        def call(*args: P.args, **kwargs: P.kwargs) -> Any:
            return client.call(self.operation, *args, **kwargs)

        return call


@dataclass(frozen=True)
class SyncResource:
    """A group of verbs on a `Client`."""

    client: "Client"


@dataclass(frozen=True)
class AsyncResource:
    """A group of verbs on an `AsyncClient`."""

    client: "AsyncClient"


class _Datasets:
    validate = Verb(datasets.validate_dataset)
    upload = Verb(datasets.upload_dataset)
    get = Verb(datasets.get_dataset)
    list = Verb(datasets.list_datasets)
    merge = Verb(datasets.merge_datasets)


class _Jobs:
    create = Verb(jobs.create_job)
    get = Verb(jobs.get_job)
    cancel = Verb(jobs.cancel_job)
    metrics = Verb(jobs.get_job_metrics)
    logs = Verb(jobs.get_job_logs)


class _Models:
    list = Verb(models.list_models)


class _Deployments:
    create = Verb(deployments.create_deployment)
    get = Verb(deployments.get_deployment)
    update = Verb(deployments.update_deployment)
    delete = Verb(deployments.delete_deployment)
    metrics = Verb(metrics.get_deployment_metrics)
    generate = Verb(generation.generate)


class _CanaryEndpoints:
    create = Verb(endpoints.create_canary_endpoint)
    get = Verb(endpoints.get_canary_endpoint)
    list = Verb(endpoints.list_canary_endpoints)
    update = Verb(endpoints.update_canary_endpoint)
    renew_lease = Verb(endpoints.renew_canary_lease)
    generate = Verb(generation.generate_by_endpoint)


class Datasets(_Datasets, SyncResource): ...


class Jobs(_Jobs, SyncResource): ...


class Models(_Models, SyncResource): ...


class Deployments(_Deployments, SyncResource): ...


class CanaryEndpoints(_CanaryEndpoints, SyncResource): ...


class AsyncDatasets(_Datasets, AsyncResource): ...


class AsyncJobs(_Jobs, AsyncResource): ...


class AsyncModels(_Models, AsyncResource): ...


class AsyncDeployments(_Deployments, AsyncResource): ...


class AsyncCanaryEndpoints(_CanaryEndpoints, AsyncResource): ...


class _Core:
    """What both clients share: settings, options, and how a call becomes an httpx request."""

    def __init__(self, settings: ClientSettings, options: Options) -> None:
        self.settings = settings
        self.options = options

    @property
    def _tries(self) -> int:
        return self.options.tries or self.settings.tries

    def _headers(self) -> dict[str, str]:
        headers = {
            "Authorization": f"Bearer {self.settings.api_key.get_secret_value()}",
            "X-Client-ID": self.settings.client_id,
            "Accept": "application/json",
        }
        extra = {
            "Idempotency-Key": self.options.idempotency_key,
            "If-Match": self.options.if_match,
            "X-Routing-Key": self.options.routing_key,
        }
        return headers | {name: value for name, value in extra.items() if value is not None}

    def _arguments(self, call: Call) -> dict[str, Any]:
        arguments: dict[str, Any] = {
            "method": call.method,
            "url": base_url(self.settings.url) + call.path,
            "params": list(call.query),
            "headers": self._headers(),
        }
        if self.options.timeout_s is not None:
            arguments["timeout"] = self.options.timeout_s
        if call.body is not None:
            arguments["json"] = call.body
        if call.form is not None and call.file is not None:
            arguments["data"] = {
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in call.form.items()
            }
            arguments["files"] = {"file": ("data.jsonl", call.file, "application/jsonl")}
        return arguments

    def _timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self.settings.read_timeout_s, connect=self.settings.connect_timeout_s)


def base_url(url: str) -> str:
    """The address without a trailing slash or version: `{base_url}` is accepted in both forms (§1, §4.9)."""
    return url.rstrip("/").removesuffix("/v1")


class Client(_Core):
    """A blocking client. Close it, or use it in a `with` block."""

    def __init__(
        self,
        settings: ClientSettings,
        transport: httpx.BaseTransport | None = None,
        options: Options | None = None,
        http: httpx.Client | None = None,
    ) -> None:
        """Connect lazily; `transport` is the seam for tests."""
        super().__init__(settings, options or Options())
        self._http = http or httpx.Client(
            transport=transport, timeout=self._timeout(), trust_env=False
        )
        self.datasets = Datasets(self)
        self.jobs = Jobs(self)
        self.models = Models(self)
        self.deployments = Deployments(self)
        self.canary_endpoints = CanaryEndpoints(self)

    def with_options(self, **changes: Any) -> Self:
        """The same connection with other `Options`, e.g. `client.with_options(idempotency_key=key)`."""
        return type(self)(self.settings, options=replace(self.options, **changes), http=self._http)

    def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call any declared operation. Raises `ApiError`, `BadResponse` or `ServiceUnreachable`."""
        talk = converse(operation, operation.bind(*args, **kwargs), self._tries, random.random)
        answer: Answer | None = None
        try:
            while True:
                step = talk.send(answer)
                answer = self._wait(step) if isinstance(step, Pause) else self._send(step)
        except StopIteration as end:
            return end.value

    def _send(self, call: Call) -> Answer:
        try:
            return Answer(self._http.request(**self._arguments(call)))
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            return Answer(failure=failure)

    @staticmethod
    def _wait(pause: Pause) -> None:
        time.sleep(pause.seconds)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        """Enter a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()


class AsyncClient(_Core):
    """The same on asyncio."""

    def __init__(
        self,
        settings: ClientSettings,
        transport: httpx.AsyncBaseTransport | None = None,
        options: Options | None = None,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        """Connect lazily; `transport` is the seam for tests."""
        super().__init__(settings, options or Options())
        self._http = http or httpx.AsyncClient(
            transport=transport,
            timeout=self._timeout(),
            trust_env=False,
            limits=httpx.Limits(max_connections=256, max_keepalive_connections=64),
        )
        self.datasets = AsyncDatasets(self)
        self.jobs = AsyncJobs(self)
        self.models = AsyncModels(self)
        self.deployments = AsyncDeployments(self)
        self.canary_endpoints = AsyncCanaryEndpoints(self)

    def with_options(self, **changes: Any) -> Self:
        """The same connection with other `Options`."""
        return type(self)(self.settings, options=replace(self.options, **changes), http=self._http)

    async def call(self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call any declared operation. Raises `ApiError`, `BadResponse` or `ServiceUnreachable`."""
        talk = converse(operation, operation.bind(*args, **kwargs), self._tries, random.random)
        answer: Answer | None = None
        try:
            while True:
                step = talk.send(answer)
                if isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                    answer = None
                else:
                    answer = await self._send(step)
        except StopIteration as end:
            return end.value

    async def _send(self, call: Call) -> Answer:
        try:
            return Answer(await self._http.request(**self._arguments(call)))
        except (httpx.HTTPError, httpx.InvalidURL) as failure:
            return Answer(failure=failure)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()


__all__ = [
    "ApiError",
    "AsyncClient",
    "BadResponse",
    "Client",
    "Options",
    "ServiceUnreachable",
    "base_url",
]
