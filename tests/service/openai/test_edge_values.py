"""Any field of a create call may hold a value that nobody meant: it is refused by its name, never with a 500."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.openai.evals import CONFIG, NEAR, ROW, SAME, source_of
from tests.support.service.evaluations import PlayedAnswers
from tests.support.service.in_process import Service

pytestmark = pytest.mark.soak

EDGES: list[Any] = [
    *("", " ", "{{}}", "{{", "{{item.}}", "item.", "1", "x" * 5000, "\u0000", "\ud800"),
    *(None, True, 0, -1, 1.5, 1e-320, 1e308, 2**63, 10**30, -(10**19)),
    *([], {}, [[]], [None], [{}], {"": ""}, {"a": None}),
]
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "seed": 1, "max_completion_tokens": 5}
GRADERS: list[dict[str, Any]] = [
    SAME | {"name": "a", "reference": "{{item.metadata.x}}"},
    {"name": "b", "type": "text_similarity", "evaluation_metric": "rouge_l", "pass_threshold": 0.5},
    {"name": "c", "type": "regex", "pattern": "a(b)"},
    {"name": "d", "type": "number", "tolerance": 0.1, "relative": 0.1},
    {
        "name": "e",
        "type": "json",
        "schema": {"type": "object", "properties": {"a": {"maximum": 3}}},
    },
    {"name": "f", "type": "json", "fields": ["a"], "pass_threshold": 1},
    {"name": "g", "type": "tool_calls"},
]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedAnswers]:
    with Service(tmp_path_factory.mktemp("edges"), maximum_active_evaluations=10_000) as service:
        made = PlayedAnswers(service).set_up()
        service.engines.may_answer.clear()
        yield made


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = value.items() if isinstance(value, dict) else ()
    for key, one in enumerate(value) if isinstance(value, list) else pairs:
        yield from places(one, (*path, key))


def changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    made = copy.deepcopy(body)
    part = made
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return made


def body_of(kind: str, played: PlayedAnswers) -> tuple[str, dict[str, Any]]:
    criteria = {"data_source_config": CONFIG, "testing_criteria": [SAME, NEAR]}
    if kind == "evaluation":
        fields = {"slice_by": ["site"], "gating": ["a"], "margin": 0.1, "max_tokens": 5, "seed": 1}
        return "/v1/evaluations", played.body(graders=GRADERS, **fields)
    if kind == "eval":
        return "/openai/v1/evals", {"name": "a", "metadata": {"a": "b"}, **criteria}
    made = played.service.call("POST", "/openai/v1/evals", json=criteria).json()["id"]
    source = source_of(played.baseline, [ROW], sampling_params=SAMPLING)
    if kind == "run by reference":
        named = {"type": "item_reference", "item_reference": "item.turns"}
        file = {"type": "file_id", "id": "file-" + "0" * 24}
        source |= {"input_messages": named, "source": file}
    return f"/openai/v1/evals/{made}/runs", {"name": "r", "data_source": source}


@pytest.mark.parametrize("kind", ["eval", "run", "run by reference", "evaluation"])
def test_an_edge_value_at_any_place_is_no_error_of_the_service(
    played: PlayedAnswers, kind: str
) -> None:
    path, body = body_of(kind, played)
    statuses = set[int]()
    for place in places(body):
        for edge in EDGES:
            content = json.dumps(changed(body, place, edge)).encode()
            answer = played.service.call(
                "POST", path, content=content, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code in (200, 201, 400, 404, 409, 422), (place, edge, answer.text)
            statuses.add(answer.status_code)
    assert len(statuses) > 1
