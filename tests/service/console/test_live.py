"""The stream that keeps an open page as it is in the service."""

import asyncio
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from tests.support.service.console import Browser, Follower, signed_in
from tests.support.service.in_process import Service, split
from tests.support.service.releases import PlayedPipeline
from tests.support.waiting import PATIENCE_S
from tuneship.service.console.page import ConsolePage
from tuneship.service.http.console import live
from tuneship.service.releases.kept_lines import without_comment
from tuneship.store.database import tables
from tuneship.store.records import release_records


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


def test_a_stream_of_another_session_is_refused(service: Service) -> None:
    browser, other = signed_in(service), signed_in(service, client="bob")
    marks = [one.open("/console/session").json()["session"] for one in (browser, other)]
    assert marks[0] != marks[1]
    answer = browser.open(f"/console/live?page=/console/jobs&session={marks[1]}")
    assert (answer.status_code, answer.text) == (200, "event: end\ndata: signed out\n\n")


def test_a_stream_shows_nothing_of_another_tenant(service: Service) -> None:
    job = service.job(client="bob")
    pipeline = PlayedPipeline(service, "one", "bob", model_name="theirs")
    deployment = service.deployment("theirs", client="bob")
    pages = f"releases/{pipeline.id}", f"jobs/{job}", f"deployments/{deployment}"
    browser = signed_in(service)

    async def run() -> None:
        for page in (f"/console/{one}" for one in pages):
            async with Follower(browser, page) as follower, asyncio.timeout(PATIENCE_S):
                kind, text = await follower.next()
                assert (kind, "theirs" in text) == ("gone", False)
                assert (await follower.next())[0] == "closed"

    service.run(run())


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


def test_a_live_release_reads_only_lines_that_are_new(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = PlayedPipeline(service, "one")
    pipeline.own("job", id="ft_" + "0" * 24)
    read: list[int] = []
    real = release_records.lines_of

    def counted(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        read.append(len(found))
        return found

    monkeypatch.setattr(release_records, "lines_of", counted)

    async def work(follower: Follower, _: Browser) -> None:
        text = (await follower.next())[1]
        assert "The training begins" in text
        await asyncio.to_thread(lambda: pipeline.own("held_gates", approver="Eve"))
        while "Eve decided" not in text:
            text = (await follower.next())[1]
        # What was read before is still shown.
        assert "The training begins" in text
        assert sum(read) == 2

    follow(service, f"/console/releases/{pipeline.id}", work)


def test_a_comment_that_is_removed_leaves_an_open_page_as_well(service: Service) -> None:
    """A part of the release that is in the hipaa mode takes comments out of lines that were read before."""
    pipeline = PlayedPipeline(service, "one")
    pipeline.own("held_gates", approver="Eve", comment="Alice Zebra")

    def remove() -> None:
        with service.database.write("alice") as connection:
            (stored,) = release_records.lines_of(connection, pipeline.id)
            release_records.rewrite(connection, stored["id"], without_comment(stored["line"]))
        pipeline.own("candidate", id="dep_" + "0" * 24)

    async def work(follower: Follower, _: Browser) -> None:
        text = (await follower.next())[1]
        assert "Alice Zebra" in text
        await asyncio.to_thread(remove)
        while "The candidate is being deployed" not in text:
            text = (await follower.next())[1]
        assert "Alice Zebra" not in text
        assert "Eve decided" in text

    follow(service, f"/console/releases/{pipeline.id}", work)


def test_a_page_is_read_again_only_after_something_was_written(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, renders = 0, 0
    read, render = ConsolePage.view, live.live_part
    job = service.job()

    async def counted(*given: Any) -> Any:
        nonlocal reads
        reads += 1
        return await read(*given)

    def rendered(*given: Any) -> str:
        nonlocal renders
        renders += 1
        return render(*given)

    monkeypatch.setattr(live, "RENDER_EVERY_S", 0.02)
    monkeypatch.setattr(live, "READ_AT_LEAST_EVERY_S", 1e6)
    monkeypatch.setattr(ConsolePage, "view", counted)
    monkeypatch.setattr(live, "live_part", rendered)

    def has_rendered_without_reading() -> bool:
        before = reads, renders
        service.until(lambda: renders >= before[1] + 3)
        return reads == before[0]

    async def work(follower: Follower, _: Browser) -> None:
        await follower.next()
        await asyncio.to_thread(service.until, has_rendered_without_reading)
        before = reads
        # Beside other writers, as metrics and logs are written.
        with service.database.write_beside() as connection:
            connection.execute(sa.update(tables.jobs).values(model_name="written-beside"))
        text = ""
        while "written-beside" not in text:
            text = (await follower.next())[1]
        assert reads > before
        # An open page shows how time passes.
        await asyncio.to_thread(service.until, has_rendered_without_reading)

    follow(service, f"/console/jobs/{job}", work)


def test_the_words_of_a_page_name_the_time_although_nothing_is_written(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "RENDER_EVERY_S", 0.02)
    monkeypatch.setattr(live, "READ_AT_LEAST_EVERY_S", 1e6)
    old, new = service.deployment("old"), service.deployment("new")
    fallback = split({old: 100, new: 0})["deployments"]
    lease = {"seconds": 600, "fallback": fallback}
    endpoint = service.canary("notes", {old: 50, new: 50}, lease=lease)

    async def work(follower: Follower, _: Browser) -> None:
        text = (await follower.next())[1]
        assert "9 min" in text
        service.clock.ahead = timedelta(minutes=5)
        while "4 min" not in text:
            text = (await follower.next())[1]

    follow(service, f"/console/endpoints/{endpoint}", work)


def test_a_few_looks_follow_writes_at_once_and_later_ones_a_second_apart() -> None:
    pace = live.LookPace()
    soon = live.WRITES_TOGETHER_S
    assert pace.pause(100.0) == pytest.approx(soon)
    # As many writes as there can be: each comes when the look before it has been made.
    now, pauses = 100.0, list[float]()
    for _ in range(12):
        pauses.append(pace.pause(now))
        now += pauses[-1]
    assert pauses[: live.LOOKS_SOONER] == pytest.approx([soon] * live.LOOKS_SOONER)
    assert pauses[-5:] == pytest.approx([live.LOOK_EVERY_S] * 5)
    # After a pause they are soon again.
    assert pace.pause(now + 60) == pytest.approx(soon)


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
