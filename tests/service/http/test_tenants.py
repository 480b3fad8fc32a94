"""To every operation another tenant's resources look as if they did not exist, and they are never changed.

The cases come from the declarations: a new operation is covered by being declared.
"""

from itertools import product
from typing import Any

import httpx
import pytest

from tests.support.service.tenants import Tenants
from tests.support.service.whole_api import (
    WITH_BODIES,
    WITH_PATH_IDS,
    Own,
    body_of,
    missing_ids,
    options_of,
    path_of,
    replaced,
)
from tuneship.contract.declaring.operation import DECLARED, Operation

pytestmark = pytest.mark.both_databases(postgres="soak")

Declared = Operation[..., Any]
PLACES = ("dataset", "dataset_2", "deployment", "model")


def assert_the_same(one: httpx.Response, other: httpx.Response) -> None:
    """Compare two answers, except for the id, the time and the place in the rate window that every answer has."""

    def essence(answer: httpx.Response) -> Any:
        volatile = {"x-request-id", "date", "x-ratelimit-remaining", "x-ratelimit-reset"}
        headers = {key: value for key, value in answer.headers.items() if key not in volatile}
        body = answer.text.replace(answer.headers["x-request-id"], "")
        return answer.status_code, headers, body

    assert essence(one) == essence(other)


@pytest.mark.parametrize("operation", WITH_PATH_IDS, ids=lambda one: one.name)
def test_another_tenants_id_in_a_path_names_nothing(tenants: Tenants, operation: Declared) -> None:
    before = tenants.world.state()
    options = options_of(operation, tenants.alice)
    theirs = tenants.ask(operation, path_of(operation, tenants.theirs), **options)
    missing = tenants.ask(operation, path_of(operation, missing_ids()), **options)
    code = "model_not_found" if operation.path_parameters == ("model_id",) else "resource_not_found"
    assert (theirs.status_code, theirs.json()["error"]["code"]) == (404, code), theirs.text
    assert_the_same(theirs, missing)
    assert tenants.world.state() == before


REFERENCES = [
    pytest.param(operation, place, id=f"{operation.name}-{place}")
    for operation, place in product(WITH_BODIES, PLACES)
    if f"its {place}" in str(body_of(operation, Own(*(f"its {one}" for one in PLACES))))
]


@pytest.mark.parametrize(("operation", "place"), REFERENCES)
def test_another_tenants_id_in_a_body_names_nothing(
    tenants: Tenants, operation: Declared, place: str
) -> None:
    options, own_id = options_of(operation, tenants.alice), getattr(tenants.alice, place)
    ids = {"dataset": "ds", "dataset_2": "ds", "deployment": "dep", "model": "model"}
    answers: list[httpx.Response] = []
    before = tenants.world.state()
    for foreign in (getattr(tenants.bob, place), missing_ids()[ids[place]]):
        body = replaced(options["json"], own_id, foreign)
        answers.append(tenants.ask(operation, path_of(operation, tenants.own), json=body))
    assert answers[0].status_code == 404, answers[0].text
    assert_the_same(*answers)
    assert tenants.world.state() == before


IDS_IN_QUERIES = [
    pytest.param(operation, name, id=f"{operation.name}-{name}")
    for operation in DECLARED
    for name in operation.query_model.model_fields
    if name.endswith("_id")
]


@pytest.mark.parametrize(("operation", "name"), IDS_IN_QUERIES)
def test_another_tenants_id_in_a_query_names_nothing(
    tenants: Tenants, operation: Declared, name: str
) -> None:
    kind = {"endpoint_id": "cep", "deployment_id": "dep", "job_id": "ft", "dataset_id": "ds"}[name]
    path = path_of(operation, tenants.own)
    answers = [
        tenants.ask(operation, path, params={name: ids[kind]})
        for ids in (tenants.theirs, missing_ids())
    ]
    assert_the_same(*answers)
    assert all(one not in answers[0].text for one in tenants.theirs.values())


LISTS = [one for one in DECLARED if one.method == "GET" and not one.path_parameters]


@pytest.mark.parametrize(("operation", "client"), list(product(LISTS, ("alice", "bob"))))
def test_a_list_shows_nothing_of_another_tenant(
    tenants: Tenants, operation: Declared, client: str
) -> None:
    other = tenants.theirs if client == "alice" else tenants.own
    answer = tenants.world.service.call("GET", operation.path, client, params={"limit": 100})
    if answer.status_code == 400:  # a list without pages
        answer = tenants.world.service.call("GET", operation.path, client)
    assert answer.status_code == 200, answer.text
    assert all(one not in answer.text for one in other.values())


def test_another_tenants_key_opens_nothing_by_naming_the_tenant(tenants: Tenants) -> None:
    headers = {**tenants.world.service.headers["alice"], "X-Client-ID": "bob"}
    for operation in DECLARED:
        path, options = path_of(operation, tenants.theirs), options_of(operation, tenants.bob)
        answer = tenants.world.service.call(
            operation.method, path, None, **options, headers=headers
        )
        assert answer.status_code == 401, operation.name
