"""Evaluations that are refused by the place of what is wrong, and those that cannot go on."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import sqlalchemy as sa

from tests.support.openai.batches import permits
from tests.support.service.evaluations import GRADERS, PLANTED, PlayedAnswers, rows
from tests.support.service.in_process import Service, jsonl
from tuneship.store.database import tables

SHARE = {"name": "b", "type": "text_similarity", "evaluation_metric": "rouge_l"}


def grader(**fields: Any) -> dict[str, Any]:
    return {"graders": [*GRADERS, {"name": "b", **fields}]}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlayedAnswers]:
    """Two deployments whose service refuses everything that is asked in this file."""
    with Service(tmp_path_factory.mktemp("bad") / "data") as service:
        yield PlayedAnswers(service).set_up()


def refusal(played: PlayedAnswers, **change: Any) -> tuple[int, str, str | None]:
    """The status, the code and the place of a refusal, after which nothing was made."""
    # Not by httpx, which writes no NaN.
    content, typed = json.dumps(played.body(**change)), {"Content-Type": "application/json"}
    answer = played.service.call("POST", "/v1/evaluations", content=content, headers=typed)
    assert PLANTED not in answer.text
    assert played.service.call("GET", "/v1/evaluations").json()["evaluations"] == []
    assert played.asked == []
    return read(answer)


def read(answer: httpx.Response) -> tuple[int, str, str | None]:
    assert answer.status_code >= 400, answer.text
    error = answer.json()["error"]
    code = error["details"][0]["code"] if error["details"] else error["code"]
    return answer.status_code, code, error["param"]


@pytest.mark.parametrize(
    ("change", "status", "code", "param"),
    [
        ({"graders": []}, 422, "out_of_range", "graders"),
        (grader(type="python"), 422, "unsupported_value", "graders[1].type"),
        (grader(type="label_model"), 422, "unsupported_value", "graders[1].type"),
        (grader(type=PLANTED), 422, "invalid_value", "graders[1].type"),
        (
            {"graders": [SHARE | {"evaluation_metric": "bleu"}]},
            *(422, "unsupported_value", "graders[0].evaluation_metric"),
        ),
        (
            {"graders": [SHARE | {"evaluation_metric": PLANTED}]},
            *(422, "invalid_value", "graders[0].evaluation_metric"),
        ),
        (
            grader(type="string_check", operation=PLANTED),
            *(422, "invalid_value", "graders[1].operation"),
        ),
        ({"graders": [*GRADERS, *GRADERS]}, 422, "invalid_value", "graders[1].name"),
        (grader(type="regex", pattern=f"({PLANTED}"), 422, "invalid_value", "graders[1].pattern"),
        (
            grader(type="json", schema={"type": PLANTED}),
            *(422, "invalid_value", "graders[1].schema"),
        ),
        (
            grader(type="string_check", input=f"{{{{{PLANTED}}}}}"),
            *(422, "invalid_value", "graders[1].input"),
        ),
        ({"graders": [{**GRADERS[0], "name": f"g{n}"} for n in range(9)]},
            422, "out_of_range", "graders"),
        ({"gating": ["nobody"]}, 422, "invalid_value", "gating[0]"),
        ({"graders": [SHARE], "gating": ["b"]}, 422, "invalid_value", "gating[0]"),
        ({"graders": [SHARE]}, 422, "invalid_value", "gating[0]"),
        ({"margin": 0}, 422, "out_of_range", "margin"),
        ({"margin": 0.5}, 422, "out_of_range", "margin"),
        # Not JSON, and refused before any field is read.
        ({"margin": float("nan")}, 400, "invalid_request_error", None),
        ({"slice_margin": 0.01}, 422, "out_of_range", "slice_margin"),
        ({"max_examples": 0}, 422, "out_of_range", "max_examples"),
        ({"max_examples": 100_001}, 422, "out_of_range", "max_examples"),
        ({"max_tokens": 257}, 422, "out_of_range", "max_tokens"),
        ({"slice_by": ["ward"]}, 422, "missing_field", "slice_by[0]"),
        ({"slice_by": ["patient"]}, 422, "too_many_slices", "slice_by[0]"),
        ({"cluster_by": "ward"}, 422, "missing_field", "cluster_by"),
        ({"dataset_id": "ds_" + "0" * 24}, 404, "resource_not_found", "dataset_id"),
        ({"candidate": "dep_" + "0" * 24}, 404, "resource_not_found", "candidate"),
        ({"baseline": "evl_" + "0" * 24}, 404, "resource_not_found", "baseline"),
        ({"baseline": "ds_" + "0" * 24}, 422, "invalid_value", "baseline"),
    ],
)  # fmt: skip
def test_a_bad_order_is_refused_by_its_place(
    untouched: PlayedAnswers, change: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    assert refusal(untouched, **change) == (status, code, param)


def test_one_deployment_is_not_compared_with_itself(untouched: PlayedAnswers) -> None:
    found = refusal(untouched, baseline=untouched.candidate)
    assert found == (422, "conflict", "baseline")


def test_answers_have_the_length_that_each_deployment_allows(played: PlayedAnswers) -> None:
    short = played.service.deployment("short", model_config={"max_output_tokens": 16})
    body = played.body(baseline=short, max_tokens=17)
    answer = played.service.call("POST", "/v1/evaluations", json=body)
    assert read(answer) == (422, "out_of_range", "max_tokens")
    assert "at most 16" in answer.json()["error"]["message"]
    assert played.shown(played.create(baseline=short))["settings"]["max_tokens"] == 16
    graders = [{"name": "c", "type": "choice"}, {"name": "l", "type": "loss"}]
    answer = played.service.call("POST", "/v1/evaluations", json=body | {"graders": graders})
    # No answer is written: these lines lack choices, and nothing else is wrong.
    assert read(answer) == (422, "missing_field", "graders[0]")


def test_a_label_of_another_form_is_refused_with_its_line(untouched: PlayedAnswers) -> None:
    lines = rows(20)
    lines[6]["metadata"]["site"] = f"{PLANTED}!"
    dataset = untouched.service.dataset(content=jsonl(*lines))
    body = untouched.body(dataset_id=dataset, slice_by=["site"])
    answer = untouched.service.call("POST", "/v1/evaluations", json=body)
    assert read(answer) == (422, "invalid_slice", "slice_by[0]")
    assert answer.json()["error"]["details"][0]["line"] == 7
    assert PLANTED not in answer.text


def test_a_deployment_that_does_not_serve_and_a_dataset_that_is_gone_are_refused(
    untouched: PlayedAnswers,
) -> None:
    service = untouched.service
    theirs = service.dataset("bob")
    assert refusal(untouched, dataset_id=theirs) == (404, "resource_not_found", "dataset_id")
    other = service.deployment("theirs", "bob")
    assert refusal(untouched, baseline=other) == (404, "resource_not_found", "baseline")
    gone = service.dataset()
    assert service.call("DELETE", f"/v1/datasets/{gone}").status_code == 200
    assert refusal(untouched, dataset_id=gone) == (404, "resource_not_found", "dataset_id")
    deleted = service.deployment("deleted")
    assert service.call("DELETE", f"/v1/deployments/{deleted}").status_code == 200
    assert refusal(untouched, candidate=deleted) == (409, "deployment_error", "candidate")
    waiting = service.dataset()
    with service.database.write() as connection:
        change = sa.update(tables.datasets).where(tables.datasets.c.id == waiting)
        connection.execute(change.values(status="processing"))
    assert refusal(untouched, dataset_id=waiting) == (409, "dataset_error", "dataset_id")


@pytest.fixture
def played(service: Service) -> PlayedAnswers:
    return PlayedAnswers(service).set_up()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"dataset_id": "other"}, "dataset_id"),
        ({"graders": [{**GRADERS[0], "operation": "ne"}]}, "graders"),
        ({"max_examples": 9}, "max_examples"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"seed": 9}, "seed"),
    ],
)
def test_scores_of_other_data_graders_or_limits_are_no_baseline(
    compared: PlayedAnswers, change: dict[str, Any], field: str
) -> None:
    if field == "dataset_id":
        change = {"dataset_id": compared.service.dataset(content=jsonl(*rows(12)))}
    body = compared.body(**({"max_examples": 10} | change))
    answer = compared.service.call("POST", "/v1/evaluations", json=body)
    assert read(answer) == (422, "not_comparable", "baseline")
    assert field in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def compared(untouched: PlayedAnswers) -> Iterator[PlayedAnswers]:
    """The same deployments, with an ended evaluation of ten examples as the baseline."""
    first = untouched.ended(untouched.create(baseline=None, max_examples=10))["id"]
    baseline, untouched.baseline = untouched.baseline, first
    yield untouched
    untouched.baseline = baseline


def test_an_evaluation_that_has_not_ended_or_has_ended_early_is_no_baseline(
    played: PlayedAnswers,
) -> None:
    played.tuned_fails = range(0, 400, 2)
    early = played.ended(played.create())
    assert early["stopped_early"]
    played.service.spare = lambda _: False
    for unfinished in (early["id"], played.create(baseline=None)):
        body = played.body(baseline=unfinished)
        answer = played.service.call("POST", "/v1/evaluations", json=body)
        assert read(answer) == (422, "not_comparable", "baseline")


def test_a_tenant_has_so_many_open_evaluations_and_no_more(tmp_path: Any) -> None:
    with Service(tmp_path / "data", maximum_active_evaluations=2) as service:
        played = PlayedAnswers(service).set_up()
        service.spare = permits(0)
        begun = [played.create(max_examples=3) for _ in range(2)]
        answer = service.call("POST", "/v1/evaluations", json=played.body())
        assert read(answer)[:2] == (429, "quota_exceeded")
        assert service.call("POST", f"/v1/evaluations/{begun[0]}/cancel").status_code == 200
        played.create(max_examples=3)


def test_a_dataset_that_was_deleted_while_its_evaluation_was_made_fails_it(
    played: PlayedAnswers,
) -> None:
    """From then on, deleting it is refused."""
    service = played.service
    service.rest()
    made = played.create()
    with service.database.write() as connection:
        connection.execute(sa.delete(tables.datasets).where(tables.datasets.c.id == played.dataset))
    service.go_on()
    found = played.ended(made)
    assert (found["status"], found["error"]["code"]) == ("failed", "dataset_gone")


def test_an_evaluation_ends_with_its_key(played: PlayedAnswers) -> None:
    service = played.service
    service.spare = permits(40)
    made = played.create()
    service.until(lambda: len(played.asked) == 40)
    service.keys.revoke(service.headers["alice"]["Authorization"][11:19])
    service.headers["alice"] = service.key_headers("alice")
    found = played.ended(made)
    assert (found["status"], found["error"]["code"]) == ("failed", "key_ended")
    service.spare = lambda _: True
    keeper = service.supervisor.leader_work.evaluations
    service.until(lambda: not keeper._runs)
    assert len(played.asked) == 40
