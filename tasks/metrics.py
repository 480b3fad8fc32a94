"""Deployment metrics: one look at one deployment. Next: `tuneship/gates/series.py` makes counts of the answer."""

from datetime import datetime
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import api
from tuneship.client import ApiError, TuneshipError

METRICS_TIMEOUT_S = 10.0
METRICS_DEADLINE_S = 30.0


@task(cache_policy=NO_CACHE, task_run_name="metrics-{deployment_id}")
def get_deployment_metrics(
    deployment_id: str,
    *,
    interval: str,
    start_time: datetime | None = None,
    end_time: datetime | None = None,
    endpoint_id: str | None = None,
) -> dict[str, Any]:
    """The answer as plain JSON values, requested twice at most and without a pause: the next look is the retry.

    A request that gets a `Retry-After` is not repeated before the next look. The values are plain because the gates
    read every server's series, also those that ours would never send. `endpoint_id` leaves out the traffic that the
    deployment got from elsewhere; only our service knows this parameter.
    """
    client = api(METRICS_DEADLINE_S).with_options(tries=1, timeout_s=METRICS_TIMEOUT_S)

    def request() -> dict[str, Any]:
        answer = client.deployments.metrics(
            deployment_id,
            start_time=start_time,
            end_time=end_time,
            interval=interval,
            endpoint_id=endpoint_id,
        )
        return answer.model_dump(mode="json")

    try:
        return request()
    except TuneshipError as error:
        if not error.retryable or (isinstance(error, ApiError) and error.retry_after):
            raise
    return request()
