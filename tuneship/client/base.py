"""The part of both clients without I/O: settings, options, deadlines, and how a call becomes a request."""

import json
import math
import random
import secrets
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import httpx

from tuneship.client.core import Conversation, HttpAnswer, Pause, converse
from tuneship.client.following import MEDIA, SILENCE_S, Following, follow_job
from tuneship.client.generation_stream import stream_generation, streaming
from tuneship.client.uploads import Progress, Readable, WatchedFile
from tuneship.contract.declaring.operation import JSON_LINES, Call, Operation
from tuneship.contract.errors import DeadlineExceeded
from tuneship.contract.generation import Generation
from tuneship.settings import ClientSettings

P = ParamSpec("P")
R = TypeVar("R")
Step = TypeVar("Step")
Answer = TypeVar("Answer")

# The longest wait for the first byte of an export.
MAKING_S = 3600.0
# Pauses between the looks at work that goes on.
FIRST_POLL_S, LONGEST_POLL_S = 0.2, 5.0
# Headers that describe the bytes on the wire; httpx has decoded the body that is kept.
ENCODING_HEADERS = frozenset({"content-encoding", "content-length", "transfer-encoding"})


@dataclass(frozen=True)
class Options:
    """Settings of a call beside its arguments."""

    # None: creates, and changes that may be tried again, get a key of their own for each call.
    idempotency_key: str | None = None
    if_match: str | None = None
    routing_key: str | None = None
    tries: int | None = None
    timeout_s: float | None = None
    # Called with the bytes that an upload has sent or a download has received so far, and with all of them (0: nobody
    # knows, which only a download may report).
    progress: Progress | None = None
    # Called with the headers of a streamed answer, before its first piece.
    heard: Callable[[Mapping[str, str]], None] | None = None
    # Moment of `time.monotonic()` at which a call has an answer or raises `DeadlineExceeded`, pauses
    # included. A stream must have ended by then, too.
    ends_at: float | None = None


class BaseClient:
    """Settings, options, and everything about a call that needs no I/O."""

    def __init__(self, settings: ClientSettings, options: Options) -> None:
        self.settings = settings
        self.options = options

    @property
    def _tries(self) -> int:
        return self.options.tries or self.settings.tries

    def _seconds_left(self) -> float:
        """Seconds until the caller's deadline; infinite without one."""
        ends_at = self.options.ends_at
        return math.inf if ends_at is None else ends_at - time.monotonic()

    def _before_deadline(
        self, name: str, talk: Generator[Step, Answer | None, R]
    ) -> Generator[Step, Answer | None, R]:
        """The steps of `talk`, the operation `name`. Raises `DeadlineExceeded` before one that would come too late."""
        answer: Answer | None = None
        while True:
            try:
                step = talk.send(answer)
            except StopIteration as end:
                return end.value
            self._check_deadline(name, step.seconds if isinstance(step, Pause) else 0.0)
            answer = yield step
            # A request that the deadline has cut off must not read as an unreachable service.
            if isinstance(answer, HttpAnswer) and answer.failure is not None:
                self._check_deadline(name, 0.0)

    def _check_deadline(self, name: str, needed_s: float) -> None:
        if self._seconds_left() <= needed_s:
            raise DeadlineExceeded(f"{name}: no answer before the deadline")

    def _conversation(
        self, operation: Operation[P, R], *args: P.args, **kwargs: P.kwargs
    ) -> Conversation[R]:
        """The steps of one call."""
        return self._conversation_of(operation, operation.bind(*args, **kwargs))

    def _conversation_of(self, operation: Operation[..., R], call: Call) -> Conversation[R]:
        """The steps of a call that is bound."""
        key = self.options.idempotency_key
        # A create gets a key even for a single try, because something between client and service may repeat it. Any
        # other change gets one only where this client may repeat it: a caller who sends it once reads it back.
        may_repeat = operation.is_creating or self._tries > 1
        if key is None and operation.takes_idempotency_key and may_repeat:
            key = secrets.token_hex(16)
        talk = converse(operation, replace(call, idempotency_key=key), self._tries, random.random)
        return self._before_deadline(operation.name, talk)

    def _polling(
        self,
        operation: Operation[P, R],
        is_over: Callable[[R], bool],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Conversation[R]:
        """The steps of calling an operation until its reply says that all is over, with growing pauses."""
        pause_s = FIRST_POLL_S
        while True:
            reply = yield from self._conversation(operation, *args, **kwargs)
            if is_over(reply):
                return reply
            yield Pause(pause_s)
            pause_s = min(LONGEST_POLL_S, 1.5 * pause_s)

    def _job_stream(self, job_id: str, after: str | None) -> tuple[Following, float]:
        """The steps of following a job, and the seconds of silence after which the connection counts as dead."""
        talk = follow_job(job_id, after, self._tries, random.random)
        return self._before_deadline("get_job_logs", talk), SILENCE_S

    def _generation_stream(
        self, operation: Operation[P, Generation], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[Following, float]:
        """The steps of a streamed generation, and the longest wait for its next piece in seconds."""
        call = streaming(operation.bind(*args, **kwargs))
        talk = stream_generation(operation, call, self._tries, random.random)
        return self._before_deadline(operation.name, talk), self.settings.read_timeout_s

    def _headers(self, call: Call) -> dict[str, str]:
        headers = {
            "Authorization": f"Bearer {self.settings.api_key.get_secret_value()}",
            "X-Client-ID": self.settings.client_id,
            "Accept": "application/json",
            "X-API-Profile": "auto",  # the models hold the names of both references, whatever the service's default
        }
        extra = {
            "Idempotency-Key": call.idempotency_key,
            "If-Match": self.options.if_match,
            "X-Routing-Key": self.options.routing_key,
        }
        return headers | {name: value for name, value in extra.items() if value is not None}

    def _request(self, call: Call) -> dict[str, Any]:
        """Arguments of httpx for one try of a call."""
        request: dict[str, Any] = {
            "method": call.method,
            "url": base_url(self.settings.url) + call.path,
            "params": list(call.query),
            "headers": self._headers(call),
        }

        left_s = self._seconds_left()
        if call.sink is not None and self.options.timeout_s is None:
            # Nothing comes before the export is made and compared.
            read_s = min(MAKING_S, left_s)
            connect_s = min(self.settings.connect_timeout_s, left_s)
            request["timeout"] = httpx.Timeout(read_s, connect=connect_s)
        elif self.options.timeout_s is not None:
            request["timeout"] = min(self.options.timeout_s, left_s)
        elif left_s < self.settings.read_timeout_s:
            connect_s = min(self.settings.connect_timeout_s, left_s)
            request["timeout"] = httpx.Timeout(left_s, connect=connect_s)

        if call.body is not None:
            request["json"] = call.body
        if call.form is not None and call.file is not None:
            request["data"] = {
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in call.form.items()
            }
            progress = self.options.progress
            file: Readable = call.file if progress is None else WatchedFile(call.file, progress)
            name = "data.jsonl" if call.file_media is JSON_LINES else "adapter.tar"
            request["files"] = {"file": (name, file, call.file_media.name)}
        return request

    def _stream_request(self, call: Call, read_timeout_s: float) -> dict[str, Any]:
        timeout = httpx.Timeout(read_timeout_s, connect=self.settings.connect_timeout_s)
        request = {"timeout": timeout} | self._request(call)
        return request | {"headers": self._headers(call) | {"Accept": MEDIA}}

    def _report_headers(self, answer: HttpAnswer) -> HttpAnswer:
        if self.options.heard is not None and answer.response is not None:
            self.options.heard(answer.response.headers)
        return answer

    def _report_received(self, response: httpx.Response) -> None:
        if self.options.progress is not None:
            # Of the bytes on the wire, as the header counts them; 0 where a proxy has taken it away.
            size = int(response.headers.get("content-length", 0))
            self.options.progress(response.num_bytes_downloaded, size)

    def _tls(self) -> ssl.SSLContext | bool:
        file = self.settings.ca_file
        return True if file is None else ssl.create_default_context(cafile=str(file))

    def _timeout(self) -> httpx.Timeout:
        return httpx.Timeout(self.settings.read_timeout_s, connect=self.settings.connect_timeout_s)


def base_url(url: str) -> str:
    """The address without a trailing slash or version: `{base_url}` is accepted in both forms (§1, §4.9)."""
    return url.rstrip("/").removesuffix("/v1")
