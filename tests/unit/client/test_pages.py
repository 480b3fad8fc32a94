"""Walking over lists gives each entry once, page after page, and never goes in a circle."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.unit.client.both_clients import Handler, both_lists
from tuneship.contract.errors import BadResponse

BASE = {"base_model": "b", "model_name": "m", "fine_tuning_method": "lora", "status": "failed"}
TIMES = {"created_at": "2026-01-01T00:00:00Z", "updated_at": "2026-01-01T00:00:00Z"}


def job(number: int) -> dict[str, Any]:
    return {"id": f"ft_{number}", **BASE, **TIMES}


def paged(jobs_at: Callable[[int], list[int]]) -> tuple[Handler, list[httpx.URL]]:
    """Play a list of jobs that may look different at each request."""
    seen: list[httpx.URL] = []

    def handle(request: httpx.Request) -> httpx.Response:
        seen.append(request.url)
        limit = int(request.url.params.get("limit", 20))
        offset = int(request.url.params.get("offset", 0))
        jobs = jobs_at(offset)
        following = offset + limit if offset + limit < len(jobs) else None
        page = {"total": len(jobs), "limit": limit, "offset": offset, "next_offset": following}
        shown = [job(number) for number in jobs[offset : offset + limit]]
        return httpx.Response(200, json={"jobs": shown, "pagination": page})

    return handle, seen


@pytest.mark.parametrize("count", [0, 1, 3, 4, 7])
def test_every_entry_comes_once_and_in_order(count: int) -> None:
    handle, seen = paged(lambda _: list(range(count)))
    for found in both_lists(handle, lambda client: client.jobs.iterate(limit=3, status="failed")):
        assert [one.id for one in found] == [f"ft_{number}" for number in range(count)]
    assert len(seen) == 2 * max(1, -(-count // 3))
    assert all(url.params["status"] == "failed" for url in seen)


def test_entries_that_new_ones_push_onto_the_next_page_come_once() -> None:
    handle, _ = paged(lambda offset: [*([-1, -2] if offset else []), *range(6)])
    for found in both_lists(handle, lambda client: client.jobs.iterate(limit=3)):
        assert [one.id for one in found] == [f"ft_{number}" for number in range(6)]


def test_the_walk_starts_where_it_must_and_fetches_only_what_is_read() -> None:
    handle, seen = paged(lambda _: list(range(100)))
    found = both_lists(handle, lambda client: client.jobs.iterate(limit=50, offset=90))
    assert [len(one) for one in found] == [10, 10]
    assert len(seen) == 2


def test_a_server_that_sends_one_around_in_circles_is_refused() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        page = {"total": 9, "limit": 1, "offset": 0, "next_offset": 1}
        return httpx.Response(200, json={"jobs": [job(1)], "pagination": page})

    with pytest.raises(BadResponse, match="does not continue"):
        both_lists(handle, lambda client: client.jobs.iterate(limit=1))


def test_a_list_without_pagination_is_one_page() -> None:
    def handle(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"models": [{"id": "a", "name": "a"}]})

    for found in both_lists(handle, lambda client: client.models.iterate()):
        assert [one.id for one in found] == ["a"]


def test_a_jobs_log_is_read_until_its_token_stays_the_same() -> None:
    entries = [{"timestamp": TIMES["created_at"], "level": "info", "message": "same"}] * 5

    def handle(request: httpx.Request) -> httpx.Response:
        start = int(request.url.params.get("after", 0))
        shown = entries[start : start + 2]
        return httpx.Response(
            200, json={"logs": shown, "pagination": {"after": str(start + len(shown))}}
        )

    for found in both_lists(handle, lambda client: client.jobs.iterate_logs("ft_1", limit=2)):
        assert len(found) == 5


def test_a_deployments_log_is_read_until_there_is_no_next_token() -> None:
    tokens = {None: "one", "one": "two", "two": None}

    def handle(request: httpx.Request) -> httpx.Response:
        token = request.url.params.get("next_token")
        line = {"timestamp": TIMES["created_at"], "level": "info", "message": f"behind {token}"}
        logs = [line | {"component": "gateway", "request_id": None}]
        return httpx.Response(200, json={"logs": logs, "pagination": {"next_token": tokens[token]}})

    use = lambda client: client.deployments.iterate_logs("dep_1", filter="level=info")  # noqa: E731
    for found in both_lists(handle, use):
        assert [one.message for one in found] == ["behind None", "behind one", "behind two"]
