"""The client works with the real service over sockets: lists, streams that break, uploads."""

import asyncio
import io
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from tests.support.service.in_process import LINES, Service, jsonl
from tuneship.client import AsyncClient, Client
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.errors import ResourceNotFound
from tuneship.contract.reports.job_reports import JobLogEntry, JobStep
from tuneship.settings import ClientSettings


class Breaking(httpx.HTTPTransport):
    """Cuts each of the first streamed answers after the given number of bytes."""

    def __init__(self, *cuts: int) -> None:
        super().__init__()
        self._cuts = list(cuts)
        self.opened = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if response.headers["content-type"] == "text/event-stream":
            self.opened += 1
            if self._cuts:
                response.stream = _Cut(response.stream, self._cuts.pop(0))
        return response


class _Cut(httpx.SyncByteStream):
    def __init__(self, whole: Any, size: int) -> None:
        self._whole, self._left = whole, size

    def __iter__(self) -> Iterator[bytes]:
        for block in self._whole:
            yield block[: self._left]
            self._left -= len(block)
            if self._left <= 0:
                raise httpx.ReadError("cut")

    def close(self) -> None:
        self._whole.close()


@pytest.fixture
def served(service: Service) -> Service:
    service.listen()
    return service


def settings_of(service: Service) -> ClientSettings:
    key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
    return ClientSettings(url=service.url, api_key=SecretStr(key), client_id="alice", tries=5)


def trained(service: Service, steps: int) -> str:
    job_id = service.job()
    trainer = service.trainer()
    trainer.start_of(steps)
    for number in range(steps):
        trainer.step(number + 1)
    trainer.complete()
    service.until(lambda: service.job_status(job_id) == "completed")
    return job_id


def steps_and_messages(entries: list[JobLogEntry | JobStep]) -> list[str | int]:
    return [one.step if isinstance(one, JobStep) else one.message for one in entries]


def test_a_stream_that_breaks_anywhere_arrives_whole_and_once(served: Service) -> None:
    job_id = trained(served, steps=6)
    with Client(settings_of(served)) as client:
        whole = steps_and_messages(list(client.jobs.follow_logs(job_id)))
        lines = [one.message for one in client.jobs.iterate_logs(job_id, limit=1)]
    assert [one for one in whole if isinstance(one, int)] == [1, 2, 3, 4, 5, 6]
    assert [one for one in whole if isinstance(one, str)] == lines
    breaking = Breaking(1, 150, 400, 30)
    with Client(settings_of(served), breaking) as client:
        assert steps_and_messages(list(client.jobs.follow_logs(job_id))) == whole
    assert breaking.opened == 5


def test_a_job_is_followed_while_it_trains(served: Service) -> None:
    job_id = served.job()
    trainer = served.trainer()
    trainer.start_of(2)

    async def follow() -> list[int]:
        client, steps = AsyncClient(settings_of(served)), []
        async for entry in client.jobs.follow_logs(job_id):
            if isinstance(entry, JobStep):
                steps.append(entry.step)
            elif not steps:
                # The client follows the job, so it must get what is written from now on.
                trainer.step(1)
                steps.append(0)
            if steps[-1:] == [1]:
                trainer.step(2)
                trainer.complete()
        await client.close()
        return steps

    assert asyncio.run(asyncio.wait_for(follow(), 120)) == [0, 1, 2]


def test_following_goes_on_behind_a_token_and_another_tenants_job_is_unknown(
    served: Service,
) -> None:
    job_id = trained(served, steps=2)
    with Client(settings_of(served)) as client:
        token = client.jobs.logs(job_id, limit=1).pagination.after
        rest = [one for one in client.jobs.follow_logs(job_id, token) if not hasattr(one, "step")]
        assert len(rest) == len(list(client.jobs.iterate_logs(job_id))) - 1
        with pytest.raises(ResourceNotFound):
            next(client.jobs.follow_logs(served.job("bob")))


def test_lists_are_walked_page_by_page(served: Service) -> None:
    datasets = [served.dataset(name=f"data {number}", tags='{"a":"b"}') for number in range(5)]
    served.dataset(name="other")
    with Client(settings_of(served)) as client:
        found = [one.id for one in client.datasets.iterate(limit=2, tags={"a": "b"})]
        events = [one.type for one in client.events.iterate(limit=2)]
    assert found == list(reversed(datasets))
    assert events.count("dataset.processed") == 6


def test_an_upload_tells_how_far_it_is(served: Service) -> None:
    content = jsonl(*LINES) * 5000
    places: list[tuple[int, int]] = []
    with Client(settings_of(served)) as client:
        watched = client.with_options(progress=lambda *place: places.append(place))
        form = DatasetUpload(name="big", format="instruction")
        assert watched.datasets.upload(form, io.BytesIO(content)).num_examples == 20_000
    assert places == sorted(places)
    assert places[-1] == (len(content), len(content))
