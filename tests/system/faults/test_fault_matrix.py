"""Faults 1-21 hit every step of a release: these tests check the tries, the pauses and what exists afterwards.

Numbers and expectations are those of the fault matrix; whole rollouts under faults are in `test_rollout_faults.py`.
"""

import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from time import monotonic
from typing import Any

import pytest

from tests.support.fakes.proxy import (
    Fault,
    canned,
    cut_answer,
    cut_request,
    half_open,
    lost,
    merged,
    refused,
    reset_unheard,
    rewritten,
    trickled,
)
from tests.system.faults.chain import HALF, STEPS, Cell, Step
from tests.system.faults.way import unknown_name, without_tls
from tuneship.client import ApiError, BadResponse, ServiceUnreachable
from tuneship.contract.errors import AuthenticationError, PermissionDenied, QuotaExceeded

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

HTML = "<html><body>Bad gateway</body></html>"
ASKED_S = 1
LATER_S = 120
"""Seconds until the date that Retry-After names; the client's pauses are recorded and not waited."""


def step_named(step: Step) -> str:
    return step.name


def those(chosen: Callable[[Step], bool]) -> Any:
    """Run the test on the chosen steps only."""
    steps = [step for step in STEPS if chosen(step)]
    return pytest.mark.parametrize("cell", steps, ids=step_named, indirect=True)


def is_shift(step: Step) -> bool:
    return step.name == "shift"


def is_look(step: Step) -> bool:
    return step.name == "look"


def succeeds(cell: Cell) -> None:
    """Run the step and check that its resource exists once, or that the split is the requested one."""
    result = cell.run()
    if cell.step.is_creating:
        assert cell.made == [result]
    if is_shift(cell.step):
        assert result == "shifted"
        assert split_of(cell) == (100 - HALF, HALF)


def fails(cell: Cell, kind: type[Exception]) -> None:
    """Check that the step raises its last error, creates nothing twice, and succeeds once the fault is over."""
    if is_shift(cell.step):
        assert cell.run() == "rolled_back"
        assert split_of(cell) == (100, 0)
        return
    with pytest.raises(kind):
        cell.run()
    tries = cell.tries
    if cell.step.is_creating:
        assert len(cell.made) <= 1
    cell.heal()
    succeeds(cell)
    cell.world.way.tries = tries


def split_of(cell: Cell) -> tuple[int, int]:
    """Return the shares of baseline and candidate, and check that no other deployment has any."""
    world = cell.world
    shares = world.split_of(cell.target)
    assert sum(shares.values()) == 100
    assert set(shares) <= {world.baseline, world.candidate}
    return shares.get(world.baseline, 0), shares.get(world.candidate, 0)


def usual_pauses(waited: Sequence[float]) -> bool:
    """Check that every pause lies between the bounds of the client's backoff."""
    return all(0.05 <= pause <= 30.0 for pause in waited)


PASSING = {
    "1-500": refused(500, "internal_error"),
    "2-502": canned(502, HTML),
    "3-503-retry-after": refused(503, "internal_error", Retry_After=str(ASKED_S)),
    "4-503": refused(503, "internal_error"),
}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_failure_that_passes_is_outlived(cell: Cell, fault: Fault, times: int) -> None:
    asks = fault is PASSING["3-503-retry-after"]
    cell.spoil(*[fault] * times)
    # The next look takes the place of a retry.
    most = 1 if asks and is_look(cell.step) else cell.step.tries
    if times >= most:
        fails(cell, ApiError)
        assert cell.tries == most
        return

    succeeds(cell)

    assert cell.tries == times + 1
    assert usual_pauses(cell.waited)
    if asks and not is_shift(cell.step):
        assert set(cell.waited) == {ASKED_S}


@pytest.mark.parametrize("fault", [PASSING["1-500"], PASSING["2-502"]], ids=["1-500", "2-502"])
def test_a_failure_that_stays_is_the_task_s_after_all_tries(cell: Cell, fault: Fault) -> None:
    cell.spoil(fault, for_ever=True)

    fails(cell, ApiError)

    assert cell.tries == cell.step.tries


LIMITED = {
    "5-seconds": lambda _: {"Retry_After": str(ASKED_S)},
    "6-date": lambda date: {"Retry_After": format_datetime(date, usegmt=True)},
    "7-absent": lambda _: {},
}


@those(lambda step: not is_look(step) and not is_shift(step))
@pytest.mark.parametrize("headers", LIMITED.values(), ids=LIMITED)
def test_a_rate_limit_is_waited_for_as_long_as_it_says(
    cell: Cell, headers: Callable[[datetime], dict[str, str]]
) -> None:
    began = datetime.now(UTC)
    date = (began + timedelta(seconds=LATER_S)).replace(microsecond=0)
    cell.spoil(refused(429, "rate_limit_exceeded", **headers(date)))

    succeeds(cell)

    (pause,) = cell.waited
    assert cell.tries == 2
    if headers is LIMITED["5-seconds"]:
        assert pause == ASKED_S
    elif headers is LIMITED["6-date"]:
        left = [(date - now).total_seconds() for now in (datetime.now(UTC), began)]
        assert left[0] <= pause <= left[1]
    else:
        assert usual_pauses([pause])


@those(lambda step: step.name in ("upload", "create-deployment"))
def test_a_limit_that_outlasts_the_client_is_waited_for_by_the_task(cell: Cell) -> None:
    cell.spoil(*[refused(429, "rate_limit_exceeded", Retry_After=str(ASKED_S))] * 2)
    began = monotonic()

    succeeds(cell)

    assert cell.tries == 3
    assert cell.waited == [ASKED_S], "the first pause is the client's"
    assert monotonic() - began >= ASKED_S, "the second one is the task's, for the clock"


@those(is_shift)
def test_5_a_limited_change_of_the_split_waits_too(cell: Cell) -> None:
    cell.spoil(refused(429, "rate_limit_exceeded", Retry_After=str(ASKED_S)))
    began = monotonic()

    succeeds(cell)

    assert cell.tries == 2
    assert monotonic() - began >= ASKED_S


@those(is_look)
def test_5_a_limited_look_leaves_it_to_the_next_one(cell: Cell) -> None:
    cell.spoil(refused(429, "rate_limit_exceeded", Retry_After=str(ASKED_S)))

    fails(cell, ApiError)

    assert cell.tries == 1


REFUSALS = {
    "8-quota": (refused(429, "quota_exceeded"), QuotaExceeded),
    "21-401": (refused(401, "authentication_error"), AuthenticationError),
    "21-403": (refused(403, "permission_denied"), PermissionDenied),
}


@pytest.mark.parametrize(("fault", "kind"), REFUSALS.values(), ids=REFUSALS)
def test_what_waiting_cannot_change_fails_at_once(
    cell: Cell, fault: Fault, kind: type[Exception]
) -> None:
    cell.spoil(fault, for_ever=True)

    fails(cell, kind)

    assert cell.tries == 1


DETOURS = ["9-refused", "10-dns", "12-connect-timeout"]


def astray(cell: Cell, detour: str) -> Callable[[Any], None]:
    nowhere = cell.world.nowhere
    return {
        "9-refused": nowhere.refused,
        "10-dns": unknown_name,
        "12-connect-timeout": nowhere.silent,
    }[detour]


@pytest.mark.parametrize("detour", DETOURS)
def test_a_service_that_is_out_of_reach_for_once_is_tried_again(cell: Cell, detour: str) -> None:
    cell.world.way.lead_astray([astray(cell, detour)])

    succeeds(cell)

    assert cell.tries == 2


@pytest.mark.parametrize("detour", ["9-refused", "10-dns"])
def test_a_service_that_stays_out_of_reach_is_given_up_after_all_tries(
    cell: Cell, detour: str
) -> None:
    cell.world.way.lead_astray([astray(cell, detour)], for_ever=True)

    fails(cell, ServiceUnreachable)

    assert cell.tries == cell.step.tries


def test_11_without_tls_nothing_is_tried_again(cell: Cell) -> None:
    cell.world.way.lead_astray([without_tls(cell.world.port)], for_ever=True)

    fails(cell, ServiceUnreachable)

    assert cell.tries == 1


ACTED = {
    "17-reset-after-it-acted": cut_request(1),
    "18-answer-cut": cut_answer(0.5),
    "19-html": rewritten(lambda _: HTML),
    "18-truncated-json": rewritten(lambda _: '{"id": "'),
}


@pytest.mark.parametrize("fault", ACTED.values(), ids=ACTED)
def test_an_answer_that_is_spoiled_makes_nothing_twice(cell: Cell, fault: Fault) -> None:
    cell.spoil(fault)

    makes_nothing_twice(cell)


def test_13_an_answer_that_does_not_come_makes_nothing_twice(cell: Cell) -> None:
    acted = threading.Event()
    cell.world.way.give_up_soon(acted)
    cell.spoil(lost(acted))

    makes_nothing_twice(cell)


def makes_nothing_twice(cell: Cell) -> None:
    succeeds(cell)
    most = 1 if is_shift(cell.step) else 2
    assert cell.tries <= most, (
        "a split is read back; what was made is found, or asked for once more"
    )


UNHEARD = {"13-half-open": half_open, "17-reset-unheard": reset_unheard}


@pytest.mark.parametrize("fault", UNHEARD.values(), ids=UNHEARD)
def test_a_request_that_nobody_heard_is_sent_again(cell: Cell, fault: Fault) -> None:
    if fault is half_open:
        cell.world.way.give_up_soon()
    cell.spoil(fault)

    succeeds(cell)

    assert cell.tries == 2


@those(lambda step: step.has_body)
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99], ids=["14-1%", "15-50%", "16-99%"])
def test_a_body_that_was_cut_is_sent_again_from_its_start(cell: Cell, share: float) -> None:
    cell.spoil(cut_request(share))

    succeeds(cell)

    assert cell.tries == 2


def test_an_answer_that_trickles_in_is_only_slow(cell: Cell) -> None:
    cell.spoil(trickled())

    succeeds(cell)

    assert cell.tries == 1


@those(lambda step: not is_shift(step))
def test_19_a_page_instead_of_json_ends_as_a_bad_response(cell: Cell) -> None:
    cell.spoil(canned(200, HTML), for_ever=True)

    fails(cell, BadResponse)

    assert cell.tries == cell.step.tries_of_spoiled


@those(is_shift)
def test_19_a_page_instead_of_every_change_moves_nothing_and_says_so(cell: Cell) -> None:
    cell.spoil(canned(200, HTML), for_ever=True)

    fails(cell, BadResponse)

    assert cell.tries == cell.step.tries


@those(lambda step: not is_shift(step))
def test_20_a_missing_field_is_named(cell: Cell) -> None:
    field = cell.step.field
    cell.spoil(rewritten(lambda answer: answer.pop(field) and None), for_ever=True)

    with pytest.raises(BadResponse, match=rf"not readable at: .*\b{field}\b"):
        cell.run()

    assert cell.tries == 1
    assert len(cell.made) == (1 if cell.step.is_creating else 0)


@those(is_shift)
def test_20_a_missing_field_in_the_answer_to_a_change_is_read_back(cell: Cell) -> None:
    cell.spoil(rewritten(lambda answer: answer.pop("id") and None))

    succeeds(cell)

    assert cell.tries == 1


def test_20_an_unknown_field_is_ignored(cell: Cell) -> None:
    cell.spoil(rewritten(merged({"surprise": {"of": ["a", "later", "release"]}})))

    succeeds(cell)

    assert cell.tries == 1


@those(lambda step: bool(step.status))
def test_20_an_unknown_status_is_not_taken_for_an_end(cell: Cell) -> None:
    cell.spoil(rewritten(merged({cell.step.status: "hibernating"})))

    succeeds(cell)

    assert cell.tries == (2 if cell.step.name == "poll-job" else 1)
