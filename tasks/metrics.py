"""Deployment metrics: one look at one deployment. `tuneship/gates/metrics/metrics_reader.py` reads the counts."""

from datetime import datetime

from prefect import task
from prefect.cache_policies import NO_CACHE

from tuneship.client import ApiError, TuneshipError
from tuneship.contract.metrics import DeploymentMetrics
from tuneship.prefect.connection import api

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
) -> DeploymentMetrics:
    """Ask at most twice and without a pause: the next look is the retry, also where the service sends `Retry-After`.

    `endpoint_id` leaves out what the deployment served elsewhere; only our service knows it.
    """
    client = api(METRICS_DEADLINE_S).with_options(tries=1, timeout_s=METRICS_TIMEOUT_S)

    def request() -> DeploymentMetrics:
        return client.deployments.metrics(
            deployment_id,
            start_time=start_time,
            end_time=end_time,
            interval=interval,
            endpoint_id=endpoint_id,
        )

    try:
        return request()
    except TuneshipError as error:
        if not error.retryable or (isinstance(error, ApiError) and error.retry_after):
            raise
    return request()
