"""The pause after a failed start of a replica: longer each time, up to a limit, however many have failed."""

import asyncio

import pytest

from tuneship.replicas.failed_starts import MAX_PAUSE_S, FailedStarts


def test_pauses_get_longer_up_to_a_limit() -> None:
    async def run() -> None:
        loop, failed, ends = asyncio.get_running_loop(), FailedStarts(), list[float]()
        before = loop.time()
        for _ in range(7):
            failed = failed.with_failure("no room")
            ends.append(failed.until)
        took = loop.time() - before
        expected = [1.0, 2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S]
        for end, pause in zip(ends, expected, strict=True):
            assert end - before == pytest.approx(pause, abs=took + 1e-6)
        assert failed.is_pausing
        assert failed.why_not == "no room"

    asyncio.run(run())


def test_starts_may_fail_for_days() -> None:
    async def run() -> None:
        failed = FailedStarts(total=5000, in_a_row=5000).with_failure("no room")
        assert (failed.total, failed.in_a_row, failed.why_not) == (5001, 5001, "no room")
        good = failed.with_success()
        assert (good.total, good.in_a_row, good.why_not) == (5001, 0, "")

    asyncio.run(run())
