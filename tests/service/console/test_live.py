"""The stream that keeps an open page as it is in the service."""

import asyncio
from datetime import timedelta

import httpx
import pytest
import sqlalchemy as sa

from tests.support.service.console import Browser, signed_in
from tests.support.service.in_process import Service
from tests.support.waiting import PATIENCE_S
from tuneship.store.database import tables


class Follower:
    """Reads the events of one open page."""

    def __init__(self, browser: Browser, page: str) -> None:
        self._browser, self._page = browser, page

    async def __aenter__(self) -> "Follower":
        service = self._browser.service
        cookies = "; ".join(f"{name}={value}" for name, value in self._browser.cookies.items())
        self._http = httpx.AsyncClient(base_url=service.url, timeout=PATIENCE_S, trust_env=False)
        request = self._http.build_request(
            "GET", f"/console/live?page={self._page}", headers={"Cookie": cookies}
        )
        self.answer = await self._http.send(request, stream=True)
        self._lines = self.answer.aiter_lines()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.answer.aclose()
        await self._http.aclose()

    async def next(self) -> tuple[str, str]:
        """The kind and the text of the next event."""
        kind, texts = "", []
        async for line in self._lines:
            if line.startswith("event: "):
                kind = line.removeprefix("event: ")
            elif line.startswith("data: "):
                texts.append(line.removeprefix("data: "))
            elif line == "" and kind:
                return kind, "\n".join(texts)
        return "closed", ""


def follow(service: Service, page: str, work) -> None:
    browser = signed_in(service)

    async def run() -> None:
        async with Follower(browser, page) as follower, asyncio.timeout(PATIENCE_S):
            await work(follower, browser)

    service.run(run())


def test_a_page_follows_what_happens(service: Service) -> None:
    job = service.job()
    trainer = service.trainer_of(job)

    async def work(follower: Follower, _: Browser) -> None:
        assert follower.answer.headers["content-type"].startswith("text/event-stream")
        kind, text = await follower.next()
        assert kind == "main"
        assert text.lstrip().startswith("<div")
        assert "<html" not in text
        await asyncio.to_thread(trainer.start_of, 2)
        await asyncio.to_thread(trainer.complete)
        while "completed" not in text:
            kind, text = await follower.next()
            assert kind == "main"

    follow(service, f"/console/jobs/{job}", work)


def test_a_stream_ends_with_its_session(service: Service) -> None:
    async def work(follower: Follower, browser: Browser) -> None:
        await follower.next()
        await asyncio.to_thread(
            lambda: browser.post("/console/sign-out", {"form_token": browser.form_token()})
        )
        assert (await follower.next())[0] == "end"

    follow(service, "/console/jobs", work)


def test_an_open_page_keeps_nobody_signed_in(service: Service) -> None:
    async def work(follower: Follower, _: Browser) -> None:
        await follower.next()
        service.clock.ahead = timedelta(minutes=16)
        assert (await follower.next())[0] == "end"

    follow(service, "/console/jobs", work)


def test_a_stream_of_no_page_is_refused(service: Service) -> None:
    assert signed_in(service).open("/console/live?page=/console/nope").status_code == 404


def test_a_live_page_records_what_it_has_not_read_before(service: Service) -> None:
    def reads() -> int:
        with service.database.read() as connection:
            query = sa.select(sa.func.count()).where(tables.audit.c.action == "list_jobs")
            return connection.scalar(query) or 0

    async def work(follower: Follower, _: Browser) -> None:
        await follower.next()
        assert await asyncio.to_thread(reads) == 0
        made = {"security_settings": {"audit_logging": True}, "model_name": "secured"}
        await asyncio.to_thread(lambda: service.job(**made))
        text = ""
        while "secured" not in text:
            text = (await follower.next())[1]
        assert await asyncio.to_thread(reads) == 1

    follow(service, "/console/jobs", work)


def test_an_idle_page_is_sent_once(service: Service) -> None:
    async def work(follower: Follower, _: Browser) -> None:
        await follower.next()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await follower.next()

    follow(service, "/console/jobs", work)


def test_a_live_page_adds_no_audit_entry_at_each_look(service: Service) -> None:
    job = service.job(security_settings={"audit_logging": True})
    trainer = service.trainer_of(job)

    def reads() -> int:
        with service.database.read() as connection:
            query = sa.select(sa.func.count()).where(tables.audit.c.action == "get_job")
            return connection.scalar(query) or 0

    async def work(follower: Follower, _: Browser) -> None:
        await follower.next()
        before = await asyncio.to_thread(reads)
        await asyncio.to_thread(trainer.start_of, 2)
        text = ""
        while "running" not in text:
            text = (await follower.next())[1]
        assert await asyncio.to_thread(reads) == before > 0

    follow(service, f"/console/jobs/{job}", work)
