"""How many background requests may be in flight at once."""

import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from tests.support.waiting import until
from tuneship.service.background_requests.pace import (
    BESIDE_OTHERS_S,
    MOST_AT_ONCE,
    BackgroundPace,
)
from tuneship.service.context.drain import Drain
from tuneship.service.telemetry.in_flight import InFlightGenerations


def pace_of(in_flight: InFlightGenerations) -> BackgroundPace:
    return BackgroundPace(in_flight, lambda _: True, Drain())


class Run:
    """A run that counts its requests in flight."""

    def __init__(self, pace: BackgroundPace, client: str) -> None:
        self.pace = pace
        self.client = client
        self.running = 0

    def take(self) -> bool:
        if not self.pace.may_start(self.client, self.running):
            return False
        self.running += 1
        return True

    def give_back(self) -> None:
        self.running -= 1
        self.pace.ended()


@contextmanager
def joined_by(pace: BackgroundPace, client: str) -> Generator[Run]:
    with pace.joined(client):
        yield Run(pace, client)


def taken(share: Run) -> int:
    """Take all that may be taken, and return how many that were."""
    number = 0
    while share.take():
        number += 1
    return number


def warmed_up(share: Run) -> None:
    for _ in range(2 * MOST_AT_ONCE):
        assert share.take()
        share.give_back()


def test_it_grows_by_one_with_each_answer_up_to_its_limit() -> None:
    with joined_by(pace_of(InFlightGenerations()), "alice") as share:
        assert taken(share) == 1
        share.give_back()
        assert taken(share) == 2
        for _ in range(100):
            share.give_back()
            taken(share)
        assert share.take() is False
        for _ in range(MOST_AT_ONCE):
            share.give_back()
        assert taken(share) == MOST_AT_ONCE


def test_somebody_who_waits_leaves_each_batch_one_and_it_starts_over_after_that() -> None:
    in_flight = InFlightGenerations()
    with ExitStack() as joined:
        pace = pace_of(in_flight)
        shares = [joined.enter_context(joined_by(pace, client)) for client in ("alice", "bob")]
        warmed_up(shares[0])
        with in_flight.track("dep"):
            until(shares[0].take)
            assert [taken(share) for share in shares] == [0, 1]
        for share in shares:
            share.give_back()
        assert [taken(share) for share in shares] == [0, 0]
        for share in shares:
            until(share.take)
        assert [taken(share) for share in shares] == [0, 0]


def test_the_pauses_of_somebody_who_asks_again_and_again_are_left_empty() -> None:
    in_flight = InFlightGenerations()
    with joined_by(pace_of(in_flight), "alice") as share:
        warmed_up(share)
        for _ in range(3):
            with in_flight.track("dep"):
                pass
            # What had begun long before may be followed by one.
            assert taken(share) <= 1
        assert share.running <= 1
        share.running = 0
        until(lambda: not in_flight.has_callers(BESIDE_OTHERS_S))
        warmed_up(share)
        assert taken(share) == MOST_AT_ONCE


def test_while_somebody_waits_a_tenant_begins_requests_with_pauses() -> None:
    in_flight = InFlightGenerations()
    with joined_by(pace_of(in_flight), "alice") as share, in_flight.track("dep"):
        assert share.take()
        begun = time.monotonic()
        share.give_back()
        assert not share.take()
        until(share.take)
        assert time.monotonic() - begun >= BESIDE_OTHERS_S / 2
        share.give_back()


def test_a_request_of_a_batch_is_nobody_who_waits() -> None:
    in_flight = InFlightGenerations()
    with joined_by(pace_of(in_flight), "alice") as share:
        warmed_up(share)
        with in_flight.track("dep", is_background=True):
            assert taken(share) == MOST_AT_ONCE


def test_tenants_share_and_then_the_batches_of_each() -> None:
    with ExitStack() as joined:
        pace = pace_of(InFlightGenerations())
        alice = joined.enter_context(joined_by(pace, "alice"))
        warmed_up(alice)
        others = [joined.enter_context(joined_by(pace, client)) for client in ("alice", "bob")]
        assert [taken(share) for share in (alice, *others)] == [4, 4, 8]


def test_a_tenant_without_room_in_its_limit_sends_nothing() -> None:
    pace = BackgroundPace(InFlightGenerations(), lambda client: client == "bob", Drain())
    with joined_by(pace, "alice") as alice, joined_by(pace, "bob") as bob:
        assert (taken(alice), taken(bob)) == (0, 1)
