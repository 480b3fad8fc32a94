"""SIGTERM: what is under way is answered, newcomers are sent away with 503, and the process ends."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.service.processes import Serve, running_deployment
from tests.waiting import until
from tuneship.client import ApiError
from tuneship.contract.generation import Generate

pytestmark = pytest.mark.slow


def test_a_drain_finishes_what_is_under_way_and_refuses_the_rest(tmp_path: Path) -> None:
    serve = Serve(tmp_path / "data", "--allow-fault-injection", preload=True)
    client = serve.client()
    slow = {"fault.delay_ms": "12000"}
    deployment_id = running_deployment(client, "slow", "tuneship-tiny", **slow)
    request = Generate(prompt="a", max_tokens=1)
    with ThreadPoolExecutor(2) as pool:
        under_way = pool.submit(client.deployments.generate, deployment_id, request)
        streaming = serve.client().deployments.stream(deployment_id, Generate(prompt="a"))
        streamed = pool.submit(list, streaming)
        newcomer = serve.client().with_options(tries=1)
        time.sleep(3)  # nothing outside shows that a request has arrived
        newcomer.models.list()
        serve.process.send_signal(signal.SIGTERM)
        refused: list[ApiError] = []

        def is_refused() -> bool:
            try:
                newcomer.models.list()
            except ApiError as error:
                refused.append(error)
            return bool(refused)

        until(is_refused)
        assert (refused[0].status, refused[0].code) == (503, "internal_error")
        assert refused[0].retryable
        assert refused[0].retry_after == 1
        assert under_way.result().deployment_id == deployment_id
        *pieces, whole = streamed.result()
        assert "".join(piece.text for piece in pieces) == whole.completion != ""
    assert serve.process.wait(60) == 0
    serve.stop()
