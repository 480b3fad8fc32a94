"""Anybody may read the document, and thousands of requests made from it get only the answers that it names."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import compile_path

from tests.service.http.test_bad_inputs import CASES
from tests.support.service.in_process import Service
from tests.support.service.openapi_world import Watch, document_of, resources
from tuneship.contract.declaring.operation import DECLARED, Operation
from tuneship.contract.document.openapi import document, possible_errors
from tuneship.service.http.routes import route_path

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,ignored_auth,unsupported_method,allow_header_conformance"
)
# Random requests bring no archive of an adapter, and meet a running lease with its version only by chance.
# Operations that need not succeed here; tests of their own show that they do.
SELDOM = {"import_model", "renew_canary_lease"}
SELDOM |= {f"{verb}_canary_endpoint" for verb in ("revert", "pause", "resume")}


def test_the_document_is_served_without_a_key_and_names_its_service(shared: Service) -> None:
    answer = shared.call("GET", "/openapi.json", None)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == document("http://service.test")
    assert answer.json()["servers"] == [{"url": "http://service.test"}]


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/v1/openapi.json"])
def test_the_frameworks_own_pages_are_off(shared: Service, path: str) -> None:
    answer = shared.call("GET", path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "resource_not_found"


@pytest.mark.parametrize(
    ("request_line", "allowed"),
    [
        ("GET /v1/datasets/merge", "POST"),
        ("DELETE /v1/datasets/validate", "POST"),
        ("DELETE /v1/models/tuneship-tiny/limits", "GET"),
        ("PATCH /v1/models/tuneship-tiny", "DELETE, GET"),
        ("PUT /v1/datasets", "GET, POST"),
        ("OPTIONS /openapi.json", "GET"),
    ],
)
def test_a_wrong_method_is_answered_with_the_right_ones_of_exactly_this_path(
    shared: Service, request_line: str, allowed: str
) -> None:
    method, path = request_line.split()
    answer = shared.call(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert answer.json()["error"]["code"] == "invalid_request_error"


def test_every_refusal_that_a_bad_input_gets_is_in_the_document() -> None:
    unnamed: list[str] = []
    for case in (one for cases in CASES.values() for one in cases):
        method, path = case["send"].split(" ", 1)
        operation = operation_of(method, path.partition("?")[0])
        if operation is not None and not is_named(operation, *case["want"]):
            unnamed.append(f"{operation.name} {case['want']}: {case['case']}")
    assert unnamed == []


def operation_of(method: str, path: str) -> Operation[..., Any] | None:
    """The operation that such a request would reach; None for an unknown address."""
    declared = [one.path for one in DECLARED]
    for one in DECLARED:
        pattern, _, _ = compile_path(route_path(one.path, declared))
        if one.method == method and pattern.match(path):
            return one
    return None


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("examples", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_the_service_answers_only_what_the_document_says(
    start: Callable[..., Service], tmp_path: Path, examples: int
) -> None:
    service = start(allow_fault_injection=True, concurrent_jobs=20, maximum_active_jobs=1000)
    watch = Watch(service.app)
    service.app = watch  # type: ignore[assignment]
    kept, lost = resources(service)
    service.engines.trains_at_once = True  # otherwise the stream of a job would never end
    service.listen()
    whole = tmp_path / "openapi.json"
    whole.write_text(json.dumps(document_of(service, kept, lost)))
    watch.answers.clear()
    run = run_schemathesis(service, whole, examples)
    assert run.returncode == 0, run.stdout[-8000:]
    by_address = {(one.method, one.path.replace(":path}", "}")): one for one in DECLARED}
    wrong = [
        (answer, times)
        for answer, times in watch.answers.items()
        if answer[:2] in by_address and not is_named(by_address[answer[:2]], *answer[2:])
    ]
    assert wrong == []
    succeeded = {
        by_address[answer[:2]].name
        for answer in watch.answers
        if answer[:2] in by_address and answer[2] < 300
    }
    assert {one.name for one in DECLARED} - succeeded <= SELDOM


def is_named(operation: Operation[..., Any], status: int, code: str | None) -> bool:
    return status == operation.status or code in possible_errors(operation).get(status, ())


def run_schemathesis(
    service: Service, whole: Path, examples: int
) -> "subprocess.CompletedProcess[str]":
    """Run Schemathesis as a program: the document's examples, its corner cases, then random requests."""
    options = [f"--header={name}: {value}" for name, value in service.headers["alice"].items()]
    options += [f"--url={service.url}"]
    options += ["--phases=examples,coverage,fuzzing", f"--max-examples={examples}", "--seed=1"]
    # A machine that stalls for a moment must not count as a failure.
    options += ["--request-timeout=120", "--suppress-health-check=too_slow"]
    options += ["--continue-on-failure", "--no-shrink", f"--checks={CHECKS}", "--warnings=off"]
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "schemathesis.cli", "run", str(whole), *options],
        cwd=whole.parent,
        env=os.environ | {"NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=1800,  # it takes 60 s of processor time
        check=False,
    )
