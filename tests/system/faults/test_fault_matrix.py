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
from tests.support.repeats import variants
from tests.system.faults.chain import HALF, STEPS, Case, Step
from tests.system.faults.way import unknown_name, without_tls
from tuneship.client import ApiError, BadResponse, ServiceUnreachable
from tuneship.contract.errors import AuthenticationError, PermissionDenied, QuotaExceeded

pytestmark = [pytest.mark.prefect, pytest.mark.slow]

HTML = "<html><body>Bad gateway</body></html>"
ASKED_S = 1
# Seconds until the date that Retry-After names; the client's pauses are recorded and not waited.
LATER_S = 120


def step_named(step: Step) -> str:
    return step.name


def those(chosen: Callable[[Step], bool]) -> Any:
    """Run the test on the chosen steps only."""
    steps = [step for step in STEPS if chosen(step)]
    return pytest.mark.parametrize("case", steps, ids=step_named, indirect=True)


def is_shift(step: Step) -> bool:
    return step.name == "shift"


def is_look(step: Step) -> bool:
    return step.name == "look"


def succeeds(case: Case) -> None:
    """Run the step and check that its resource exists once, or that the split is the requested one."""
    result = case.run()
    if case.step.is_creating:
        assert case.created == [result]
    if is_shift(case.step):
        assert result == "shifted"
        assert split_of(case) == (100 - HALF, HALF)


def fails(case: Case, kind: type[Exception]) -> None:
    """Check that the step raises its last error, creates nothing twice, and succeeds once the fault is over."""
    if is_shift(case.step):
        assert case.run() == "rolled_back"
        assert split_of(case) == (100, 0)
        return
    with pytest.raises(kind):
        case.run()
    tries = case.tries
    if case.step.is_creating:
        assert len(case.created) <= 1
    case.heal()
    succeeds(case)
    case.environment.transport.tries = tries


def split_of(case: Case) -> tuple[int, int]:
    """Return the shares of baseline and candidate, and check that no other deployment has any."""
    environment = case.environment
    shares = environment.split_of(case.target)
    assert sum(shares.values()) == 100
    assert set(shares) <= {environment.baseline, environment.candidate}
    return shares.get(environment.baseline, 0), shares.get(environment.candidate, 0)


def usual_pauses(waited: Sequence[float]) -> bool:
    """Check that every pause lies between the bounds of the client's backoff."""
    return all(0.05 <= pause <= 30.0 for pause in waited)


PASSING = {
    "1-500": refused(500, "internal_error"),
    "2-502": canned(502, HTML),
    "3-503-retry-after": refused(503, "internal_error", Retry_After=str(ASKED_S)),
    "4-503": refused(503, "internal_error"),
}


@pytest.mark.parametrize("times", variants([1, 3]))
@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING)
def test_a_failure_that_passes_is_outlived(case: Case, fault: Fault, times: int) -> None:
    asks = fault is PASSING["3-503-retry-after"]
    case.spoil(*[fault] * times)
    # The next look takes the place of a retry.
    most = 1 if asks and is_look(case.step) else case.step.tries
    if times >= most:
        fails(case, ApiError)
        assert case.tries == most
        return

    succeeds(case)

    assert case.tries == times + 1
    assert usual_pauses(case.waited)
    if asks and not is_shift(case.step):
        assert set(case.waited) == {ASKED_S}


@pytest.mark.parametrize("fault", [PASSING["1-500"], PASSING["2-502"]], ids=["1-500", "2-502"])
def test_a_failure_that_stays_is_the_task_s_after_all_tries(case: Case, fault: Fault) -> None:
    case.spoil(fault, for_ever=True)

    fails(case, ApiError)

    assert case.tries == case.step.tries


LIMITED = {
    "5-seconds": lambda _: {"Retry_After": str(ASKED_S)},
    "6-date": lambda date: {"Retry_After": format_datetime(date, usegmt=True)},
    "7-absent": lambda _: {},
}


@those(lambda step: not is_look(step) and not is_shift(step))
@pytest.mark.parametrize("headers", LIMITED.values(), ids=LIMITED)
def test_a_rate_limit_is_waited_for_as_long_as_it_says(
    case: Case, headers: Callable[[datetime], dict[str, str]]
) -> None:
    began = datetime.now(UTC)
    date = (began + timedelta(seconds=LATER_S)).replace(microsecond=0)
    case.spoil(refused(429, "rate_limit_exceeded", **headers(date)))

    succeeds(case)

    (pause,) = case.waited
    assert case.tries == 2
    if headers is LIMITED["5-seconds"]:
        assert pause == ASKED_S
    elif headers is LIMITED["6-date"]:
        left = [(date - now).total_seconds() for now in (datetime.now(UTC), began)]
        assert left[0] <= pause <= left[1]
    else:
        assert usual_pauses([pause])


@those(lambda step: step.name in ("upload", "create-deployment"))
def test_a_limit_that_outlasts_the_client_is_waited_for_by_the_task(case: Case) -> None:
    case.spoil(*[refused(429, "rate_limit_exceeded", Retry_After=str(ASKED_S))] * 2)
    began = monotonic()

    succeeds(case)

    assert case.tries == 3
    assert case.waited == [ASKED_S], "the first pause is the client's"
    assert monotonic() - began >= ASKED_S, "the second one is the task's, for the clock"


@those(is_shift)
def test_5_a_limited_change_of_the_split_waits_too(case: Case) -> None:
    case.spoil(refused(429, "rate_limit_exceeded", Retry_After=str(ASKED_S)))
    began = monotonic()

    succeeds(case)

    assert case.tries == 2
    assert monotonic() - began >= ASKED_S


@those(is_look)
def test_5_a_limited_look_leaves_it_to_the_next_one(case: Case) -> None:
    case.spoil(refused(429, "rate_limit_exceeded", Retry_After=str(ASKED_S)))

    fails(case, ApiError)

    assert case.tries == 1


REFUSALS = {
    "8-quota": (refused(429, "quota_exceeded"), QuotaExceeded),
    "21-401": (refused(401, "authentication_error"), AuthenticationError),
    "21-403": (refused(403, "permission_denied"), PermissionDenied),
}


@pytest.mark.parametrize(("fault", "kind"), REFUSALS.values(), ids=REFUSALS)
def test_a_fault_that_waiting_cannot_change_fails_at_once(
    case: Case, fault: Fault, kind: type[Exception]
) -> None:
    case.spoil(fault, for_ever=True)

    fails(case, kind)

    assert case.tries == 1


DETOURS = ["9-refused", "10-dns", "12-connect-timeout"]


def astray(case: Case, detour: str) -> Callable[[Any], None]:
    nowhere = case.environment.nowhere
    return {
        "9-refused": nowhere.refused,
        "10-dns": unknown_name,
        "12-connect-timeout": nowhere.silent,
    }[detour]


@pytest.mark.parametrize("detour", DETOURS)
def test_a_service_that_is_out_of_reach_for_once_is_tried_again(case: Case, detour: str) -> None:
    case.environment.transport.lead_astray([astray(case, detour)])

    succeeds(case)

    assert case.tries == 2


@pytest.mark.parametrize("detour", ["9-refused", "10-dns"])
def test_a_service_that_stays_out_of_reach_is_given_up_after_all_tries(
    case: Case, detour: str
) -> None:
    case.environment.transport.lead_astray([astray(case, detour)], for_ever=True)

    fails(case, ServiceUnreachable)

    assert case.tries == case.step.tries


def test_11_without_tls_nothing_is_tried_again(case: Case) -> None:
    case.environment.transport.lead_astray([without_tls(case.environment.port)], for_ever=True)

    fails(case, ServiceUnreachable)

    assert case.tries == 1


ACTED = {
    "17-reset-after-it-acted": cut_request(1),
    "18-answer-cut": cut_answer(0.5),
    "19-html": rewritten(lambda _: HTML),
    "18-truncated-json": rewritten(lambda _: '{"id": "'),
}


@pytest.mark.parametrize("fault", ACTED.values(), ids=ACTED)
def test_an_answer_that_is_spoiled_makes_nothing_twice(case: Case, fault: Fault) -> None:
    case.spoil(fault)

    makes_nothing_twice(case)


def test_13_an_answer_that_does_not_come_makes_nothing_twice(case: Case) -> None:
    acted = threading.Event()
    case.environment.transport.give_up_soon(acted)
    case.spoil(lost(acted))

    makes_nothing_twice(case)


def makes_nothing_twice(case: Case) -> None:
    succeeds(case)
    most = 1 if is_shift(case.step) else 2
    assert case.tries <= most, (
        "a split is read back; what was made is found, or asked for once more"
    )


UNHEARD = {"13-half-open": half_open, "17-reset-unheard": reset_unheard}


@pytest.mark.parametrize("fault", UNHEARD.values(), ids=UNHEARD)
def test_a_request_that_nobody_heard_is_sent_again(case: Case, fault: Fault) -> None:
    if fault is half_open:
        case.environment.transport.give_up_soon()
    case.spoil(fault)

    succeeds(case)

    assert case.tries == 2


@those(lambda step: step.has_body)
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99], ids=["14-1%", "15-50%", "16-99%"])
def test_a_body_that_was_cut_is_sent_again_from_its_start(case: Case, share: float) -> None:
    case.spoil(cut_request(share))

    succeeds(case)

    assert case.tries == 2


def test_an_answer_that_trickles_in_is_only_slow(case: Case) -> None:
    case.spoil(trickled())

    succeeds(case)

    assert case.tries == 1


@those(lambda step: not is_shift(step))
def test_19_a_page_instead_of_json_ends_as_a_bad_response(case: Case) -> None:
    case.spoil(canned(200, HTML), for_ever=True)

    fails(case, BadResponse)

    assert case.tries == case.step.tries_of_spoiled


@those(is_shift)
def test_19_a_page_instead_of_every_change_moves_nothing_and_says_so(case: Case) -> None:
    case.spoil(canned(200, HTML), for_ever=True)

    fails(case, BadResponse)

    assert case.tries == case.step.tries


@those(lambda step: not is_shift(step))
def test_20_a_missing_field_is_named(case: Case) -> None:
    field = case.step.field
    case.spoil(rewritten(lambda answer: answer.pop(field) and None), for_ever=True)

    with pytest.raises(BadResponse, match=rf"not readable at: .*\b{field}\b"):
        case.run()

    assert case.tries == 1
    assert len(case.created) == (1 if case.step.is_creating else 0)


@those(is_shift)
def test_20_a_missing_field_in_the_answer_to_a_change_is_read_back(case: Case) -> None:
    case.spoil(rewritten(lambda answer: answer.pop("id") and None))

    succeeds(case)

    assert case.tries == 1


def test_20_an_unknown_field_is_ignored(case: Case) -> None:
    case.spoil(rewritten(merged({"surprise": {"of": ["a", "later", "release"]}})))

    succeeds(case)

    assert case.tries == 1


@those(lambda step: bool(step.status))
def test_20_an_unknown_status_is_not_taken_for_an_end(case: Case) -> None:
    case.spoil(rewritten(merged({case.step.status: "hibernating"})))

    succeeds(case)

    assert case.tries == (2 if case.step.name == "poll-job" else 1)
