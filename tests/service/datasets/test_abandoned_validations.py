"""The check of a large file, which may take minutes, holds up no upload and ends with its caller."""

import asyncio
import time
from typing import Any, BinaryIO

import httpx
import pytest

from tests.support.service.in_process import LINES, Service, jsonl
from tests.support.waiting import until
from tuneship.service.datasets import new_datasets
from tuneship.service.datasets.reading import DatasetReading, Plan, ReadingStopped, read_dataset

LARGE = jsonl(*LINES) * 100
FORM = {"name": "d", "format": "instruction", "base_model": "tuneship-tiny"}


def form_of(content: bytes, *fields: str) -> dict[str, Any]:
    file = {"file": ("d.jsonl", content, "application/jsonl")}
    return {"files": file, "data": {name: FORM[name] for name in fields}}


def test_validations_leave_uploads_alone_and_end_with_their_callers(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []

    def read_for_ever(file: BinaryIO, size: int, plan: Plan) -> DatasetReading:
        if size < len(LARGE):
            return read_dataset(file, size, plan)
        begun.append(size)
        while not plan.is_halted():
            time.sleep(0.01)
        raise ReadingStopped

    monkeypatch.setattr(new_datasets, "read_dataset", read_for_ever)
    service.listen()
    senders = [f"tenant{number}" for number in range(4)]
    for name in (*senders, "fifth"):
        service.headers[name] = service.key_headers(name)

    async def leave() -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            path = f"{service.url}/v1/datasets"
            asking = [
                asyncio.create_task(
                    client.post(
                        f"{path}/validate",
                        headers=service.headers[one],
                        **form_of(LARGE, "format", "base_model"),
                    )
                )
                for one in senders
            ]
            await asyncio.to_thread(until, lambda: len(begun) == len(senders))
            uploaded = await client.post(
                path, headers=service.headers["fifth"], **form_of(jsonl(*LINES), *FORM)
            )
            assert uploaded.status_code == 201, uploaded.text
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    asyncio.run(leave())
    service.until(lambda: service.parts.threads.validations.is_idle)
