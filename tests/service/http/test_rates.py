"""Every answer reports its rate window; how requests are counted is tested in `cluster/test_rate_laws.py`."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

import httpx
from sqlalchemy import event

from tests.support.service.in_process import Service
from tuneship.service.access.api_keys import new_key
from tuneship.service.http.forwarding import source_of
from tuneship.service.http.rate_limits import FAILURES_PER_MINUTE, RateLimits
from tuneship.store.database import rows, tables

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


def test_a_refused_key_hears_how_many_failures_are_left(service: Service) -> None:
    limited(service, control=50)
    wrong = {"Authorization": "Bearer x", "X-Client-ID": "alice"}
    answers = asked_from_one_address(service, [wrong] * (FAILURES_PER_MINUTE + 1))
    limit, left = "x-ratelimit-limit", "x-ratelimit-remaining"
    assert {one.headers[limit] for one in answers} == {str(FAILURES_PER_MINUTE)}
    assert [int(one.headers[left]) for one in answers] == [*range(19, -1, -1), 0]
    assert all(int(one.headers["x-ratelimit-reset"]) > 0 for one in answers)
    for path in ("/healthz", "/readyz", "/openapi.json"):  # nothing is counted there
        assert limit not in service.call("GET", path, None).headers


def asked_from_one_address(
    service: Service, callers: Sequence[dict[str, str]]
) -> list[httpx.Response]:
    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(
            transport=service.transport(), base_url="http://service.test"
        ) as http:
            return [await http.get("/v1/datasets", headers=headers) for headers in callers]

    return service.run(ask())


def limited(service: Service, control: int, generate: int = 0) -> "SetClock":
    """Set limits with a clock that stands still, so that no window ends while a test counts requests."""
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


class SetClock:
    def __init__(self) -> None:
        self.now = datetime(2026, 1, 1, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def test_windows_of_the_past_are_forgotten() -> None:
    clock = SetClock()
    limits = RateLimits(5, 5, clock, most_kept=100)
    for number in range(1000):
        clock.now += timedelta(seconds=1)
        limits.count(f"client-{number}", "control")
    assert len(limits._counts) < 250


def test_a_source_that_guesses_is_held_off_and_good_keys_from_there_are_not(
    service: Service,
) -> None:
    """A whole hospital with one outdated agent may share an address. The good keys were never used before."""
    limited(service, control=0)
    good = [service.key_headers("alice"), service.key_headers("bob")]
    revoked = service.key_headers("alice")
    service.keys.revoke(revoked["Authorization"].removeprefix("Bearer ")[4:12])
    wrong = {"Authorization": "Bearer x", "X-Client-ID": "alice"}
    crossed = {**good[0], "X-Client-ID": "bob"}
    made_up = {"Authorization": f"Bearer {new_key()}", "X-Client-ID": "alice"}
    bad = [wrong, crossed, made_up, revoked, {}]
    answers = asked_from_one_address(
        service, [*[wrong] * FAILURES_PER_MINUTE, *bad, *good, wrong, *good]
    )
    statuses = [one.status_code for one in answers]
    assert statuses[:FAILURES_PER_MINUTE] == [401] * FAILURES_PER_MINUTE
    held_off = answers[FAILURES_PER_MINUTE : FAILURES_PER_MINUTE + len(bad)]
    assert [one.status_code for one in held_off] == [429] * len(bad)
    texts = {one.text.replace(one.headers["x-request-id"], "") for one in held_off}
    assert len(texts) == 1, "what is wrong with a key is not said"
    assert all(1 <= int(one.headers["retry-after"]) <= 60 for one in held_off)
    assert statuses[FAILURES_PER_MINUTE + len(bad) :] == [200, 200, 429, 200, 200]


def test_keys_that_are_made_up_cost_a_source_that_is_held_off_no_look_ups(
    service: Service,
) -> None:
    limited(service, control=0)
    wrong = {"Authorization": "Bearer x", "X-Client-ID": "alice"}
    asked_from: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        asked_from.extend([statement] * ("FROM api_keys" in statement))

    async def guess() -> list[int]:
        async with httpx.AsyncClient(
            transport=service.transport(), base_url="http://service.test"
        ) as http:
            for _ in range(FAILURES_PER_MINUTE):
                await http.get("/v1/datasets", headers=wrong)
            moment = service.clock()
            service.keys._clock = lambda: moment  # all within one second
            event.listen(service.database.engine, "before_cursor_execute", note)
            answers = [
                await http.get("/v1/datasets", headers={**wrong, "Authorization": f"Bearer {key}"})
                for key in (new_key() for _ in range(200))
            ]
            return [one.status_code for one in answers]

    assert service.run(guess()) == [429] * 200
    assert len(asked_from) == 1


def test_a_network_of_ipv6_is_one_source() -> None:
    limits = RateLimits(0, 0, SetClock())
    for number in range(FAILURES_PER_MINUTE):
        limits.count_failure(source_of(f"2001:db8:1:2::{number:x}"))
    assert limits.failures(source_of("2001:db8:1:2:ffff::1")).exceeded
    assert not limits.failures(source_of("2001:db8:1:3::1")).exceeded
    assert source_of("::ffff:10.0.0.1") == source_of("10.0.0.1") == "10.0.0.1"
