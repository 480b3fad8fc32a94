"""After SIGTERM running requests are answered, new ones get 503, and the process ends."""

import json
import signal
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import h11
import httpx
import pytest

from tests.support.service.processes import Serve, running_deployment
from tests.support.waiting import PATIENCE_S, until
from tuneship.client import ApiError

pytestmark = pytest.mark.slow


class AcceptedRequest:
    """A request that the service has accepted: it asked for the body, which it does not if it refuses a request."""

    def __init__(self, serve: Serve, path: str, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        headers = {
            "Host": "service.test",
            **serve.headers,
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            "Expect": "100-continue",
        }
        address = urlsplit(serve.url)
        self._socket = socket.create_connection((address.hostname, address.port), PATIENCE_S)
        self._http = h11.Connection(h11.CLIENT)
        self._send(h11.Request(method="POST", target=path, headers=list(headers.items())))
        assert isinstance(self._next(), h11.InformationalResponse)
        self._send(h11.Data(content), h11.EndOfMessage())

    def _send(self, *events: Any) -> None:
        self._socket.sendall(b"".join(self._http.send(event) or b"" for event in events))

    def _next(self) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(self._socket.recv(1 << 16))
        return event

    def answer(self) -> str:
        """Return the whole body of the answer."""
        head, blocks = self._next(), list[bytes]()
        assert head.status_code == 200, head
        while not isinstance(event := self._next(), h11.EndOfMessage):
            blocks.append(event.data)
        self._socket.close()
        return b"".join(blocks).decode()


def test_a_drain_finishes_what_is_in_flight_and_refuses_the_rest(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "data", "--allow-fault-injection", preload=True)
    try:
        slow = {"fault.delay_ms": "15000"}  # half of the time that a drain allows
        deployment_id = running_deployment(serve.client(), "slow", "tuneship-tiny", **slow)
        newcomer = serve.client().with_options(tries=1)
        newcomer.models.list()
        path = f"/v1/deployments/{deployment_id}/generate"
        in_flight = AcceptedRequest(serve, path, {"prompt": "a", "max_tokens": 1})
        streaming = AcceptedRequest(serve, path, {"prompt": "a", "stream": True})
        serve.process.send_signal(signal.SIGTERM)
        refused: list[ApiError] = []

        def is_refused() -> bool:
            try:
                newcomer.models.list()
            except ApiError as error:
                refused.append(error)
            return bool(refused)

        until(is_refused)
        assert (refused[0].status, refused[0].code) == (503, "internal_error")
        assert refused[0].retryable
        assert refused[0].retry_after == 1
        assert json.loads(in_flight.answer())["deployment_id"] == deployment_id
        *pieces, whole = frames(streaming.answer())
        assert {kind for kind, _ in pieces} == {"token"}
        text = "".join(data["text"] for _, data in pieces)
        assert (whole[0], whole[1]["completion"]) == ("done", text)
        assert text
        assert serve.process.wait(PATIENCE_S) == 0
    finally:
        serve.stop()


def frames(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Return kind and data of each event of a stream."""
    blocks = [block.split("\n") for block in text.split("\n\n") if block.startswith("event: ")]
    return [(kind[len("event: ") :], json.loads(data[len("data: ") :])) for kind, data in blocks]


def test_a_notice_lets_a_balancer_go_before_anything_is_refused(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "data", drain_notice_s="600")
    try:
        client = serve.client().with_options(tries=1)
        serve.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{serve.url}/readyz").status_code == 503)
        assert httpx.get(f"{serve.url}/healthz").status_code == 200
        client.models.list()
        # A second signal ends the notice, and the drain finds nothing in flight.
        serve.process.send_signal(signal.SIGTERM)
        assert serve.process.wait(PATIENCE_S) == 0
    finally:
        serve.stop()
