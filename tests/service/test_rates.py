"""Windows of requests are exact, every answer says where they stand, and quotas are none of them."""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import httpx
import pytest

from tests.service.in_process import Service
from tuneship.service.rates import FAILURES_PER_MINUTE, RateLimits
from tuneship.store import rows, tables

Start = Callable[..., Service]


def test_every_authenticated_answer_says_where_its_window_stands(start: Start) -> None:
    service = start()
    clock = limited(service, control=50, generate=9)
    answers = [
        service.call("GET", "/v1/datasets"),
        service.call("GET", "/v1/nowhere"),
        service.call("PUT", "/v1/datasets"),
        service.call("POST", "/v1/fine-tuning/jobs", content=b"{"),
    ]
    left = [int(one.headers["x-ratelimit-remaining"]) for one in answers]
    assert [one.status_code for one in answers] == [200, 404, 405, 415]
    assert left == list(range(left[0], left[0] - 4, -1))
    assert {one.headers["x-ratelimit-limit"] for one in answers} == {"50"}
    wait = int(answers[0].headers["x-ratelimit-reset"]) - clock().timestamp()
    assert 0 < wait <= 60
    generated = service.call("POST", "/v1/deployments/dep_x/generate", json={"prompt": "a"})
    assert generated.headers["x-ratelimit-limit"] == "9"
    assert "x-ratelimit-limit" not in service.call("GET", "/v1/datasets", None).headers


def limited(service: Service, control: int, generate: int = 0) -> "SetClock":
    """Windows by a clock that stands still: none ends while a test counts what it lets through."""
    clock = SetClock()
    service.limit(RateLimits(control, generate, clock))
    return clock


def test_the_request_after_the_wait_passes(start: Start) -> None:
    service = start()
    clock = limited(service, control=3)
    answers = [service.call("GET", "/v1/datasets") for _ in range(7)]
    refused = answers[-1]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert (refused.headers["x-should-retry"], refused.headers["x-ratelimit-remaining"]) == (
        "true",
        "0",
    )
    clock.now += timedelta(seconds=int(refused.headers["retry-after"]))
    assert service.call("GET", "/v1/datasets").status_code == 200
    assert service.call("GET", "/v1/datasets", "bob").status_code == 200


def test_a_key_without_the_scope_writes_no_more_audit_rows_than_its_window_has_requests(
    start: Start,
) -> None:
    service = start()
    service.headers["viewer"] = service.key_headers("alice", frozenset({"jobs:read"}))
    limited(service, control=3)
    answers = [service.call("DELETE", "/v1/datasets/ds_x", "viewer") for _ in range(7)]
    assert [one.status_code for one in answers] == [403] * 3 + [429] * 4
    with service.database.read() as connection:
        refused = tables.audit.c.status == 403
        assert rows.count(connection, tables.audit, refused) == 3


def test_a_limit_of_zero_is_none(start: Start) -> None:
    service = start(control_requests_per_minute=0)
    answers = [service.call("GET", "/v1/datasets") for _ in range(9)]
    assert {one.status_code for one in answers} == {200}
    assert not any("x-ratelimit-limit" in one.headers for one in answers)


def test_ten_windows_of_sixteen_clients_are_exact() -> None:
    """10,000 requests a window: each client gets its limit in each of its windows, and not one more."""
    clock, limit = SetClock(), 60
    limits = RateLimits(limit, limit, clock)
    accepted: Counter[tuple[str, int]] = Counter()
    for number in range(100_000):
        clock.now += timedelta(seconds=600 / 100_000)
        window = limits.count(f"client-{number % 16}", "control")
        assert window is not None
        assert window.limit == limit
        if not window.exceeded:
            accepted[f"client-{number % 16}", window.reset] += 1
        else:
            assert window.remaining == 0
            assert (
                clock.now.timestamp() < window.reset <= clock.now.timestamp() + window.retry_after
            )
    whole = {
        window: number
        for window, number in accepted.items()
        if window[1] - 60 >= SetClock().now.timestamp() and window[1] <= clock.now.timestamp()
    }
    assert len(whole) >= 16 * 9
    assert set(whole.values()) == {limit}
    assert max(accepted.values()) == limit


class SetClock:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def test_kinds_of_requests_are_counted_apart() -> None:
    limits = RateLimits(1, 1, SetClock())
    windows = [limits.count("alice", kind) for kind in ("control", "generate", "control")]
    assert [window.exceeded for window in windows if window] == [False, False, True]


def test_windows_of_the_past_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneship.service.rates.MOST_KEPT", 100)
    clock = SetClock()
    limits = RateLimits(5, 5, clock)
    for number in range(1000):
        clock.now += timedelta(seconds=1)
        limits.count(f"client-{number}", "control")
    assert len(limits._counts) < 250


def test_a_source_that_guesses_is_held_off_before_any_look_up(service: Service) -> None:
    limited(service, control=0)
    wrong = {"Authorization": "Bearer x", "X-Client-ID": "alice"}

    async def guess(number: int) -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=service.transport(), base_url="http://service.test"
        ) as http:
            answers = [await http.get("/v1/datasets", headers=wrong) for _ in range(number)]
            return [*answers, await http.get("/v1/datasets", headers=service.headers["alice"])]

    answers = service.run(guess(FAILURES_PER_MINUTE + 1))
    assert [one.status_code for one in answers] == [401] * FAILURES_PER_MINUTE + [429, 429]
    assert 1 <= int(answers[-1].headers["retry-after"]) <= 60
    assert service.call("GET", "/v1/datasets").status_code == 200  # another address
