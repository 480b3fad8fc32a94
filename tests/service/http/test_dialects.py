"""Another API or kind of pages is a `Dialect` that `build_app` is given, and nothing else."""

from collections.abc import Iterator

import pytest
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from tests.support.service.in_process import Service
from tuneship.contract.declaring.operation import Example, Operation
from tuneship.contract.errors import ResourceNotFound
from tuneship.service.context.bindings import BoundOperation
from tuneship.service.context.context import Context
from tuneship.service.http import Boundary, build_app
from tuneship.service.http.dialect import Dialect
from tuneship.service.http.openai import OPENAI
from tuneship.service.http.rate_limits import RateLimits
from tuneship.service.http.routes import route


class Greeting(BaseModel):
    text: str


def greet(name: str) -> Greeting:
    """Greet somebody."""
    raise NotImplementedError


def answer_greet(context: Context, name: str) -> Greeting:
    return Greeting(text=f"{context.client_id} greets {name}")


async def show_page(_request: Request) -> Response:
    return PlainTextResponse("a page")


GREET = Operation("GET", "/third/greetings/{name}", "jobs:read", 200, (), (), Example(), greet)
THIRD = Dialect(
    prefix="/third/",
    credentials=lambda request: (
        [f"Bearer {key}" for name, key in request.cookies.items() if name == "key"],
        None,
    ),
    declared=(GREET,),
    routes=lambda _boundary: (route("GET", "/third/page", show_page),),
    open_paths=frozenset({"/third/page"}),
    answer_headers=lambda _state, _began: {"X-Third": "1"},
    error_answer=lambda _request, error, _request_id: PlainTextResponse(
        f"refused: {error.message}", error.status
    ),
    unknown_route=lambda: ResourceNotFound("no such page"),
)


@pytest.fixture
def third(service: Service) -> Iterator[Service]:
    boundary = Boundary(service.parts, service.keys, RateLimits(0, 0, service.clock))
    service.app = build_app([BoundOperation(GREET, answer_greet)], boundary, [OPENAI, THIRD])
    yield service
    service.limit()


def cookie(service: Service, scopes: frozenset[str]) -> dict[str, str]:
    key = service.key_headers("alice", scopes)["Authorization"].removeprefix("Bearer ")
    return {"Cookie": f"key={key}"}


def test_a_third_dialect_finds_callers_in_its_own_way(third: Service) -> None:
    headers = cookie(third, frozenset({"jobs:read"}))
    answer = third.call("GET", "/third/greetings/bob", None, headers=headers)
    assert answer.json() == {"text": "alice greets bob"}
    assert answer.headers["x-third"] == "1"
    other = third.call("GET", "/v1/datasets", None, headers=headers)
    assert other.status_code == 401
    assert "x-third" not in other.headers
    assert third.call("GET", "/third/page", None).text == "a page"


def test_a_third_dialect_refuses_in_its_own_form(third: Service) -> None:
    keyless = third.call("GET", "/third/greetings/bob", "alice")
    assert (keyless.status_code, keyless.text[:9]) == (401, "refused: ")
    assert keyless.headers["content-type"].startswith("text/plain")

    headers = cookie(third, frozenset())
    powerless = third.call("GET", "/third/greetings/bob", None, headers=headers)
    assert powerless.status_code == 403
    assert powerless.text == "refused: this key lacks the scope jobs:read"

    unknown = third.call("GET", "/third/nothing", None, headers=headers)
    assert (unknown.status_code, unknown.text) == (404, "refused: no such page")
    assert third.call("GET", "/v1/nothing").json()["error"]["code"] == "resource_not_found"
    assert third.call("GET", "/openai/v1/nothing").json()["error"]["code"] == "unknown_url"
