"""Metrics for the gates: cells, callers, and how a split draws routing keys."""

from collections import Counter
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.service.in_process import Service
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.metrics.windows import CELLS_PER_DOUBLING
from tuneship.service.context.context import Context
from tuneship.service.endpoints.lookup import own_endpoint
from tuneship.service.generation.routing import RoutingTarget, choose_by_split
from tuneship.store.database import tables
from tuneship.store.records import metric_windows
from tuneship.store.records.metric_windows import HOUR

OUTCOMES = {
    RequestOutcome.SUCCESS: 40,
    RequestOutcome.SERVER_ERROR: 3,
    RequestOutcome.CANCELLED: 4,
    RequestOutcome.REFUSED: 5,
}


def metrics_of(service: Service, deployment: str, **query: Any) -> dict[str, Any]:
    answer = service.call("GET", f"/v1/deployments/{deployment}/metrics", params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


def in_a_past_minute(service: Service) -> float:
    """Return the start of a minute five minutes ago, in the same hour and day as the minutes around it."""
    service.clock.ahead += (1800 - service.clock().timestamp()) % 3600 * one_second(service)
    return service.clock().timestamp() // 60 * 60 - 300


def one_second(service: Service) -> Any:
    return type(service.clock.ahead)(seconds=1)


def serve(service: Service, deployment: str, start: float, **fields: Any) -> None:
    """Record requests of one minute: successes of 1 to 40 s, and some of every other kind."""
    shape: dict[str, Any] = {"prompt_tokens": 2, "completion_tokens": 10, **fields}
    for outcome, number in OUTCOMES.items():
        for place in range(number):
            service.parts.recorder.record(
                Observation(
                    *(deployment, "", start + place, outcome, 1000.0 * (1 + place)),
                    **{**shape, "caller": place % 3},
                )
            )
    service.supervisor.records.store_metrics()


@pytest.mark.both_databases
@pytest.mark.parametrize("interval", ["30s", "1m", "90s", "1h", "1d"])
def test_cells_hold_the_successes_of_every_interval(service: Service, interval: str) -> None:
    deployment = service.deployment("d")
    start = in_a_past_minute(service)
    serve(service, deployment, start)
    serve(service, deployment, start + 1, is_background=True)
    series = metrics_of(service, deployment, interval=interval)["metrics"]
    for cells in (
        series["latency"]["cells"],
        series["latency"]["cells_per_token"],
        series["token_usage"]["cells"],
    ):
        assert cells["per_doubling"] == CELLS_PER_DOUBLING
        assert sum(map(sum, cells["count"])) == 40
        assert all(index == sorted(set(index)) for index in cells["index"])
    assert len(series["token_usage"]["cells"]["index"]) == len(series["token_usage"]["timestamps"])
    assert len(series["latency"]["cells"]["index"]) == len(series["latency"]["timestamps"])
    for index, counts in zip(
        series["latency"]["cells"]["count"], series["latency"]["histogram"]["counts"], strict=True
    ):
        assert sum(index) == counts[-1]
    # Ten tokens each: exactly the cell that ends at 2^(54/16) = 10.4.
    tokens = [index for index in series["token_usage"]["cells"]["index"] if index]
    assert {cell for index in tokens for cell in index} == {54}


def test_callers_are_counted_by_how_their_requests_ended(service: Service) -> None:
    deployment = service.deployment("d")
    serve(service, deployment, in_a_past_minute(service))
    errors = metrics_of(service, deployment)["metrics"]["error_rate"]
    names = ("error_callers", "cancelled_callers", "refused_callers")
    assert [errors[name] for name in names] == [[3], [3], [3]]
    assert errors["cancelled_count"] == [4]


def test_traffic_says_how_requests_were_distributed(service: Service) -> None:
    deployment = service.deployment("d")
    start = in_a_past_minute(service)
    serve(service, deployment, start, sticky_key=7, spread_keys=2, replicas=3)
    serve(service, deployment, start + 60, replicas=0)
    traffic = metrics_of(service, deployment)["metrics"]["traffic"]
    assert traffic["spread_keys"] == [2, 0]
    # One key sends everything; without a key each request is a caller.
    assert traffic["callers_of_half"] == [1, 26]
    assert traffic["replicas"] == [3, None]
    assert traffic["repeated_requests"] == [0, 0]


def test_a_month_by_minutes_has_no_cells_and_is_read_from_the_hours(service: Service) -> None:
    deployment = service.deployment("d")
    serve(service, deployment, in_a_past_minute(service))
    start = f"{service.clock() - 29 * 86_400 * one_second(service):%Y-%m-%dT%H:%M:%SZ}"
    series = metrics_of(service, deployment, start_time=start)["metrics"]
    assert series["latency"]["cells"] is series["token_usage"]["cells"] is None
    assert series["error_rate"]["refused_callers"] == [None]
    assert series["error_rate"]["request_count"] == [43]


def test_newer_counts_are_forgotten_with_their_windows(service: Service) -> None:
    deployment = service.deployment("d")
    serve(service, deployment, in_a_past_minute(service))
    late = service.clock().timestamp() + 91 * 24 * HOUR
    with service.database.write() as connection:
        metric_windows.forget(connection, late)
        assert connection.execute(sa.select(tables.finer_windows)).all() == []


# The draw.


class Callers:
    """Chooses deployments for requests as the service does, without the models."""

    def __init__(self, service: Service, endpoint: str) -> None:
        self.service = service
        self.endpoint = endpoint

    def choose(self, key: str | None, seconds: float = 0.0) -> RoutingTarget:
        """Route one request, and let so much time pass."""
        self.service.clock.ahead += seconds * one_second(self.service)
        context = Context(
            parts=self.service.parts, client_id="alice", request_id="req_x", routing_key=key
        )
        row = own_endpoint(context, self.endpoint)
        return choose_by_split(context, row)


def divided(service: Service, **fields: Any) -> tuple[Callers, dict[str, Any]]:
    one, two = service.deployment("one"), service.deployment("two")
    shares = [{"id": name, "traffic_percentage": 50} for name in (one, two)]
    body = {"name": "shop", "deployments": shares, **fields}
    made = service.call("POST", "/v1/canary-endpoints", json=body)
    assert made.status_code == 201, made.text
    return Callers(service, made.json()["id"]), made.json()


def test_a_large_key_is_drawn_by_request_within_two_minutes_while_a_split_is_active(
    service: Service,
) -> None:
    callers, made = divided(service)
    assert (made["large_keys"], made["rollout_id"]) == ("spread", None)
    service.clock.ahead += (60 - service.clock().timestamp() % 60) * one_second(service)
    found: Counter[str] = Counter()
    for number in range(900):
        target = callers.choose("a big site" if number % 4 == 0 else f"caller {number}", 0.2)
        if number % 4 == 0 and number >= 600:
            found[target.deployment_id] += 1
            assert (target.sticky_key, target.spread_keys) == (None, 1)
        elif number % 4:
            assert target.sticky_key is not None
    assert min(found.values()) > 20
    assert len(found) == 2


@pytest.mark.parametrize("handling", ["keep", "alone"])
def test_a_large_key_stays_where_the_split_keeps_it_or_is_not_divided(
    service: Service, handling: str
) -> None:
    callers, made = divided(service, **{"large_keys": "keep"} if handling == "keep" else {})
    if handling == "alone":
        shares = [
            one | {"traffic_percentage": 100 * (not place)}
            for place, one in enumerate(made["deployments"])
        ]
        path = f"/v1/canary-endpoints/{callers.endpoint}"
        assert service.call("PATCH", path, json={"deployments": shares}).status_code == 200
    targets = [callers.choose("a big site", 0.2) for _ in range(900)]
    assert len({target.deployment_id for target in targets}) == 1
    assert {target.spread_keys for target in targets} == {0}
    assert (targets[-1].sticky_key is None) == (handling == "alone")


def test_a_rollout_keeps_its_callers_and_another_draws_them_independently(service: Service) -> None:
    callers, made = divided(service, rollout_id="rollout-1")
    keys = [f"caller {number}" for number in range(400)]

    def drawn(**fields: Any) -> list[str]:
        body = {"deployments": made["deployments"], **fields}
        answer = service.call("PATCH", f"/v1/canary-endpoints/{callers.endpoint}", json=body)
        assert answer.json()["rollout_id"] == fields.get("rollout_id")
        return [callers.choose(key).deployment_id for key in keys]

    first = [callers.choose(key).deployment_id for key in keys]
    assert drawn(rollout_id="rollout-1") == first
    for other in (drawn(rollout_id="rollout-2"), drawn()):
        same = sum(one == another for one, another in zip(first, other, strict=True))
        assert 140 < same < 260


@pytest.mark.parametrize(
    "fields", [{"rollout_id": ""}, {"rollout_id": "a\nb"}, {"rollout_id": 7}, {"large_keys": "no"}]
)
def test_a_split_with_an_unusable_salt_or_handling_is_refused(
    service: Service, fields: dict[str, Any]
) -> None:
    one = service.deployment("one")
    body = {"name": "shop", "deployments": [{"id": one, "traffic_percentage": 100}], **fields}
    answer = service.call("POST", "/v1/canary-endpoints", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, next(iter(fields)))


def test_no_log_holds_a_routing_key_or_its_hash(service: Service) -> None:
    callers, _ = divided(service)
    key = "patient 4711"
    for _ in range(3):
        answer = service.call(
            "POST",
            f"/v1/endpoints/{callers.endpoint}/generate",
            json={"prompt": "a"},
            headers={"X-Routing-Key": key},
        )
        assert answer.status_code == 200
        assert key not in answer.text
    number = str(service.parts.recorder.number_of(f"routing key {key}"))
    assert not [line for line in service.log.texts if key in line or number in line]


# Requests in flight.


def test_a_service_alone_answers_for_itself(service: Service) -> None:
    deployment = service.deployment("d")
    with service.parts.in_flight.track(deployment) as request:
        request.accepted = 0.0
        snapshot = metrics_of(service, deployment)["in_flight"]
    assert snapshot["requests"] == 1
