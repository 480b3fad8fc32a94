"""The metrics that the service publishes suffice for the watch after the bake, from the first hour on."""

import random
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.support.service.in_process import Service
from tuneship.contract.metrics import DeploymentMetrics
from tuneship.gates.watch import INTERVAL, QUARTER, asked_from, first_traffic, rounded_up, weigh
from tuneship.metrics.observations import Observation, RequestOutcome

A_MINUTE = 30


def serve_hours(service: Service, deployment: str, endpoint: str, start: datetime) -> None:
    """Record two and a half hours of traffic, in which every tenth request of the last 45 minutes fails."""
    dice = random.Random(5)  # noqa: S311 - traffic of a test
    for minute in range(150):
        share = 0.1 if minute >= 105 else 0.005
        for number in range(A_MINUTE):
            failed = dice.random() < share
            service.parts.recorder.record(
                Observation(
                    deployment_id=deployment,
                    endpoint_id=endpoint,
                    ended_at=start.timestamp() + minute * 60 + dice.random() * 60,
                    outcome=RequestOutcome.SERVER_ERROR if failed else RequestOutcome.SUCCESS,
                    latency_ms=dice.lognormvariate(6, 0.5),
                    prompt_tokens=3,
                    completion_tokens=4,
                    is_empty=False,
                    caller=minute * A_MINUTE + number,
                )
            )


def test_a_deployment_that_turns_bad_is_found_in_the_services_own_metrics(shared: Service) -> None:
    deployment = shared.deployment("turns bad")
    endpoint = shared.canary("watched", {deployment: 100})
    start = rounded_up(datetime.now(UTC) - timedelta(hours=4))
    serve_hours(shared, deployment, endpoint, start)

    def ask(begins: datetime, until: datetime) -> dict[str, Any]:
        query = {
            "interval": INTERVAL,
            "endpoint_id": endpoint,
            "start_time": begins.isoformat(),
            "end_time": until.isoformat(),
        }
        answer = shared.call("GET", f"/v1/deployments/{deployment}/metrics", params=query)
        assert answer.status_code == 200, answer.text
        return DeploymentMetrics.model_validate(answer.json()).model_dump(mode="json")

    def found(until: datetime) -> set[str]:
        first = ask(start, until)
        weighed = weigh(first, ask(asked_from(start, until), until), start, until)
        assert not weighed.unusable
        assert {one.gate for one in weighed.readings} >= {"error", "slow", "very_slow", "empty"}
        return {one.gate for one in weighed.readings if one.is_worse}

    assert first_traffic(ask(start - QUARTER, start + 4 * QUARTER)) == start
    assert found(start + 7 * QUARTER) == set()
    assert found(start + 10 * QUARTER) == {"error"}
