"""A key that a lost member worked on is free at once, and the member makes nothing with it if it goes on after all."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.service.in_process import CATALOGUE, Service
from tests.support.waiting import until
from tuneship.store.database import rows, tables

pytestmark = pytest.mark.postgres


def test_a_member_that_only_seemed_lost_makes_nothing_with_its_keys(
    members: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, other = members
    body = {"base_model": "tuneship-tiny", "dataset_id": leader.dataset(), "model_name": "m"}
    entered, goes_on = threading.Event(), threading.Event()
    look_up = CATALOGUE.get

    def slow_at_first(identifier: str) -> Any:
        """Stand still in the first create, before it holds any lock."""
        if not entered.is_set():
            entered.set()
            goes_on.wait()
        return look_up(identifier)

    def create(member: Service) -> httpx.Response:
        headers = {"Idempotency-Key": "one"}
        return member.call("POST", "/v1/fine-tuning/jobs", json=body, headers=headers)

    monkeypatch.setattr(CATALOGUE, "get", slow_at_first)
    with ThreadPoolExecutor(1) as threads:
        late = threads.submit(create, other)
        entered.wait()
        try:
            assert create(leader).status_code == 409, "while the member is there"
            other.vanish()
            answers = list[httpx.Response]()

            def is_taken_over() -> bool:
                answers.append(create(leader))
                return answers[-1].status_code == 201

            until(is_taken_over)
        finally:
            goes_on.set()
        refused = late.result()
    assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "true")
    # What its client asks for again is answered with what was made meanwhile.
    again = create(other)
    assert again.headers["idempotent-replayed"] == "true"
    assert again.json()["id"] == answers[-1].json()["id"]
    with leader.database.read() as connection:
        assert rows.count(connection, tables.jobs) == 1
