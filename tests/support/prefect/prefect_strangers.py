"""Callers of a Prefect server who lack its string: other users of the host, pages of other sites, rebound names."""

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

ELSEWHERE = "https://evil.example"
REBOUND = "rebound.evil.example"
STRANGERS: Mapping[str, Mapping[str, str]] = {
    "a local caller": {},
    "a page of another site": {"Origin": ELSEWHERE},
    "a page of a rebound name": {"Host": REBOUND, "Origin": f"http://{REBOUND}"},
    "a guess": {"Authorization": "Basic YWRtaW46cGFzcw=="},
    "a sandboxed page": {"Origin": "null"},
}
# They say only that a server is there. Its pages are static files, open to whoever has its address.
OPEN = {("GET", "/health"), ("GET", "/ready")}
NOTHING = {400, 401}
METHODS = ("get", "post", "put", "patch", "delete")
ANY_ID = "00000000-0000-0000-0000-000000000000"


def declared(api: str) -> Iterator[tuple[str, str]]:
    """Method and path of each operation that the server declares."""
    schema = httpx.get(f"{api.removesuffix('/api')}/openapi.json", trust_env=False, timeout=120)
    for path, operations in schema.json()["paths"].items():
        for method in METHODS:
            if method in operations:
                whole = path
                while "{" in whole:
                    whole = whole[: whole.index("{")] + ANY_ID + whole[whole.index("}") + 1 :]
                yield method.upper(), whole.removeprefix("/api")


def assert_strangers_get_nothing(api: str) -> None:
    """Check every operation and every socket of the server at this address as each stranger."""
    operations = [one for one in declared(api) if one not in OPEN]
    assert len(operations) > 150, "the server declares far fewer operations than it has"
    with httpx.Client(trust_env=False, timeout=120) as client:
        # A simple request, which browsers send without asking first.
        simple = {"Content-Type": "text/plain", "Origin": ELSEWHERE}
        for method, path in [*operations, ("GET", "/docs"), ("GET", "/openapi.json")]:
            answer = client.request(method, f"{api}{path}", headers=simple, content=b"{}")
            _assert_nothing(answer, f"{method} {path}")
        for who, headers in STRANGERS.items():
            for path, body in attacks():
                answer = client.post(f"{api}{path}", headers=headers, json=body)
                _assert_nothing(answer, f"{who}: {path}")
        for origin in (ELSEWHERE, "null"):
            asked = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization,content-type",
            }
            answer = client.request("OPTIONS", f"{api}/block_documents/filter", headers=asked)
            assert answer.status_code == 400
            assert "access-control-allow-origin" not in answer.headers
        for path in ("/", "/api/health", "/ui-settings", "/openapi.json"):
            rebound = client.get(f"{api.removesuffix('/api')}{path}", headers={"Host": REBOUND})
            assert rebound.status_code == 400, f"a rebound name gets {path}"
    for path in sockets():
        for words in (
            [],
            [json.dumps({"type": "auth"})],
            [json.dumps({"type": "auth", "token": "a:b"})],
        ):
            _assert_socket_closes(api, path, words)


def attacks() -> Iterator[tuple[str, Any]]:
    """Requests by which a secret is read, and a program is run."""
    yield "/block_documents/filter", {"include_secrets": True}
    yield "/flows/", {"name": "mine"}
    yield (
        "/deployments/",
        {"name": "mine", "flow_id": ANY_ID, "job_variables": {"command": "id"}},
    )
    yield f"/deployments/{ANY_ID}/create_flow_run", {"state": {"type": "SCHEDULED"}}
    yield "/flow_runs/", {"flow_id": ANY_ID}
    yield f"/flow_runs/{ANY_ID}/resume", {"run_input": {"approve": True}}
    yield "/events", []


def sockets() -> list[str]:
    """Paths of all websocket routes of this version of Prefect."""
    from prefect.server.api.server import API_ROUTERS
    from starlette.routing import WebSocketRoute

    routes: list[Any] = [route for router in API_ROUTERS for route in router.routes]
    found = [
        route.path.replace("{work_pool_name}", "tuneship")
        for route in routes
        if isinstance(route, WebSocketRoute) or type(route).__name__ == "APIWebSocketRoute"
    ]
    assert len(found) >= 4
    return found


def _assert_nothing(answer: httpx.Response, what: str) -> None:
    assert answer.status_code in NOTHING, f"{what} -> {answer.status_code}"
    assert "access-control-allow-origin" not in answer.headers, what
    assert answer.text in ('{"exception_message":"Unauthorized"}', "Invalid host header"), what


def _assert_socket_closes(api: str, path: str, words: list[str]) -> None:
    """Check that the socket says nothing to somebody with these words, whatever page or name they come by."""
    parts = urlsplit(api)
    for name, protocols in (
        (parts.hostname, ["prefect"]),
        (parts.hostname, []),
        (REBOUND, ["prefect"]),
    ):
        heard: list[str | bytes] = []
        with (
            suppress(ConnectionClosed, InvalidStatus),
            socket.create_connection((parts.hostname, parts.port)) as line,
            connect(
                f"ws://{name}:{parts.port}{parts.path}{path}",
                sock=line,
                origin=None if name == REBOUND else ELSEWHERE,  # pyright: ignore[reportArgumentType]
                subprotocols=[Subprotocol(one) for one in protocols],
                proxy=None,
            ) as stranger,
        ):
            assert name != REBOUND, f"{path} is open to a rebound name"
            assert protocols, f"{path} is open without the handshake"
            for one in [*words, "{}"]:
                stranger.send(one)
            while True:
                heard.append(stranger.recv(timeout=120))
        assert not heard, f"{path} says {heard}"
