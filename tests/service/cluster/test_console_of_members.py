"""The console of a cluster: pages, sessions, live pages and forms are the same at whichever member answers."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.support.service.console import Browser, Follower, signed_in
from tests.support.service.in_process import Service, split
from tests.support.service.releases import NOON, PlayedPipeline, asked, begun
from tests.support.waiting import PATIENCE_S, until
from tuneship.gates.record import SplitConfirmed

pytestmark = pytest.mark.postgres


@pytest.fixture
def listening(members: list[Service]) -> list[Service]:
    for member in members:
        member.listen()
    return members


def at(browser: Browser, member: Service) -> Browser:
    """The same browser, whose requests the balancer sends to another member."""
    other = Browser(member)
    other.cookies = browser.cookies
    return other


def follow(browser: Browser, page: str, work: Callable[[Follower], Awaitable[None]]) -> None:
    async def run() -> None:
        async with Follower(browser, page) as follower, asyncio.timeout(PATIENCE_S):
            await work(follower)

    browser.service.run(run())


async def text_with(follower: Follower, wanted: str) -> str:
    """The first content of an open page that has this text."""
    while True:
        kind, text = await follower.next()
        assert kind == "main"
        if wanted in text:
            return text


def test_a_release_is_followed_and_paused_at_any_member(listening: list[Service]) -> None:
    first, second = listening
    old, new = first.deployment("old"), first.deployment("new")
    back = split({old: 100, new: 0})["deployments"]
    lease = {"seconds": 3600, "fallback": back, "pausable": True}
    endpoint = first.canary("shop", {old: 75, new: 25}, lease=lease)
    pipeline = PlayedPipeline(first, "one", model_name="notes-v14", endpoint_id=endpoint)
    pipeline.facts(begun(old, new, endpoint))

    here = signed_in(first, "approver")
    there = at(here, second)
    page = f"/console/releases/{pipeline.id}"
    assert "notes-v14" in there.open(page).text

    async def watch(follower: Follower) -> None:
        await text_with(follower, "The rollout begins")
        # The pipeline talks to the first member, the page is open at the second one.
        await asyncio.to_thread(lambda: pipeline.facts(SplitConfirmed(25, NOON)))
        await text_with(follower, "The candidate gets 25 % of the traffic")
        await asyncio.to_thread(pause)
        await text_with(follower, "Paused by B. Reviewer")

    def pause() -> None:
        fields = {"form_token": here.form_token(), "endpoint_id": endpoint, "name": "B. Reviewer"}
        assert there.post("/console/do/pause_canary_endpoint", fields).status_code == 303

    follow(there, page, watch)
    # Each member keeps what it has read for a second.
    until(lambda: "Paused by B. Reviewer" in here.open(page).text)


def test_a_sign_out_at_one_member_ends_pages_and_streams_of_the_others(
    listening: list[Service],
) -> None:
    first, second = listening
    here = signed_in(first)
    there = at(here, second)
    pipeline = asked(first, "one")
    page = f"/console/releases/{pipeline.id}"

    async def watch(follower: Follower) -> None:
        await follower.next()
        token = here.form_token()
        leave = {"form_token": token}
        left = await asyncio.to_thread(lambda: here.post("/console/sign-out", leave))
        assert left.status_code == 303
        while (kind := (await follower.next())[0]) == "main":
            pass
        assert kind == "end"

    # What the browser had, as a thief would keep it.
    kept = Browser(second)
    kept.cookies.update(here.cookies)
    follow(there, page, watch)
    refused = kept.open(page)
    assert (refused.status_code, refused.headers["location"].partition("?")[0]) == (
        303,
        "/console/sign-in",
    )


def test_a_key_that_is_revoked_at_one_member_ends_streams_of_the_others(
    listening: list[Service],
) -> None:
    first, second = listening
    here = signed_in(first)
    there = at(here, second)
    key = first.parts.sessions.find(
        next(iter(here.cookies.values())), is_use=False
    ).principal.key_id

    async def watch(follower: Follower) -> None:
        await follower.next()
        await asyncio.to_thread(first.keys.revoke, key)
        while (kind := (await follower.next())[0]) == "main":
            pass
        assert kind in ("end", "error", "closed")

    follow(there, "/console/jobs", watch)
    # Each member keeps what it knows about a key for two seconds.
    until(lambda: there.open("/console/jobs").status_code == 303)
