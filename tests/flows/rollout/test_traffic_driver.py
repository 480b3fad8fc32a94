"""The driver sends prompts, counts answers, keeps no text, and stops when it is asked to."""

import json
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest

from flows.rollout import traffic_driver
from flows.rollout.traffic_driver import TrafficDriver, read_prompts
from flows.shared.errors import BadInput
from tests.flows.conftest import wait_for
from tests.support.fakes.canary_service import (
    BASELINE,
    CANDIDATE,
    ENDPOINT,
    Arm,
    FakeService,
    Refusal,
)
from tests.support.waiting import until
from tuneship.gates.plan import DriverTraffic
from tuneship.settings import ClientSettings

pytestmark = pytest.mark.slow
IN_FLIGHT = 16
# Seconds for which a refusal slows the driver down that does not say for how long.
SLOWED_S = 1.0


def driver(service: FakeService, **changes: object) -> TrafficDriver:
    usual = {"prompts": "unused", "requests_per_second": 200.0, "max_in_flight": IN_FLIGHT}
    fields = usual | changes
    settings = ClientSettings(url=service.url, api_key="key", client_id="tests")
    return TrafficDriver(settings, ENDPOINT, DriverTraffic.model_validate(fields), ["one", "two"])


def test_every_answer_is_counted_for_the_deployment_that_gave_it() -> None:
    candidate = Arm(error_share=lambda *_: 0.0, empty_share=0.5)
    with FakeService(candidate, Arm(error_share=lambda *_: 0.25)) as fake:
        fake.make_endpoint({BASELINE: 60, CANDIDATE: 40})
        sending = driver(fake)
        with sending:
            wait_for(lambda: len(fake.generations) >= 40)
        counts = sending.counts.take(BASELINE, CANDIDATE)

    asked = fake.generations.count(CANDIDATE), fake.generations.count(BASELINE)
    assert (counts.candidate_requests, counts.baseline_requests) == asked
    assert counts.candidate_failed == 0
    assert abs(counts.baseline_failed - counts.baseline_requests / 4) <= 1
    assert abs(counts.candidate_bad["empty"] - counts.candidate_requests / 2) <= 1
    assert counts.baseline_bad["empty"] == 0


def test_taken_counts_start_again_at_nothing() -> None:
    with FakeService() as fake:
        fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
        sending = driver(fake)
        with sending:
            wait_for(lambda: len(fake.generations) >= 5)
        first = sending.counts.take(BASELINE, CANDIDATE)
        second = sending.counts.take(BASELINE, CANDIDATE)

    assert first.baseline_requests == len(fake.generations)
    assert second.baseline_requests == 0


def test_too_many_requests_slow_the_driver_and_are_no_observation() -> None:
    with FakeService() as fake:
        fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
        fake.refuse_generation = Refusal(429, "rate_limit_exceeded")
        sending = driver(fake, max_in_flight=1)
        with sending:
            wait_for(lambda: len(fake.refused_at) >= 3)
        counts = sending.counts.take(BASELINE, CANDIDATE)

    pauses = [later - earlier for earlier, later in pairwise(fake.refused_at)]
    assert min(pauses) >= SLOWED_S, "it waits before the next one"
    assert counts.baseline_requests == 0


def test_at_its_end_it_sends_nothing_more_and_cuts_no_answer_off() -> None:
    with FakeService() as fake:
        fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
        fake.generation_gate = gate = threading.Event()
        sending = driver(fake)
        with sending:
            wait_for(lambda: fake.waiting == IN_FLIGHT)
            threading.Timer(0.5, gate.set).start()

    counts = sending.counts.take(BASELINE, CANDIDATE)
    assert (counts.baseline_requests, counts.baseline_abandoned) == (IN_FLIGHT, 0)
    assert len(fake.generations) == IN_FLIGHT
    assert not is_driving()


def test_answers_that_do_not_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_driver, "FINISH_WITHIN_S", 0.1)
    with FakeService() as fake:
        fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
        fake.generation_gate = threading.Event()
        with driver(fake):
            wait_for(lambda: fake.waiting >= 4)
        until(lambda: not is_driving(), 30)  # the answers stay open for longer
        fake.generation_gate.set()


def is_driving() -> bool:
    return any(thread.name == "traffic-driver" for thread in threading.enumerate())


@pytest.mark.parametrize("allowed", [3, 300], ids=["few", "more than a pool of connections"])
def test_as_many_requests_are_open_as_allowed_and_no_more(allowed: int) -> None:
    with FakeService() as fake:
        fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
        fake.generation_gate = threading.Event()
        with driver(fake, max_in_flight=allowed):
            wait_for(lambda: fake.waiting >= allowed)
            time.sleep(0.2)
            open_requests = fake.waiting
            fake.generation_gate.set()

    assert open_requests == allowed


def test_the_plan_says_how_long_an_answer_is_waited_for() -> None:
    with FakeService() as fake:
        fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
        fake.generation_gate = threading.Event()
        sending = driver(fake, timeout_seconds=0.1)
        with sending:
            wait_for(lambda: sending.counts.take(BASELINE, CANDIDATE).unanswered > 0)
            fake.generation_gate.set()


def test_prompts_are_the_instruction_or_prompt_of_each_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"instruction": "a", "response": "x"}, {"prompt": "b"}]
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")

    assert read_prompts(file) == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "secret"}\n{"other": "secret"}\n', "line 2"),
        ("not json: secret\n", "line 1"),
        ('{"prompt": 5}\n', "line 1"),
        ("\n", "no lines"),
    ],
)
def test_bad_prompts_are_named_by_line_and_never_shown(
    tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)

    with pytest.raises(BadInput, match=message) as refused:
        read_prompts(file)

    assert "secret" not in str(refused.value)


def test_a_missing_prompts_file_is_one_clear_message(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        read_prompts(tmp_path / "nowhere.jsonl")


def keys_of(fake: FakeService) -> list[str]:
    return [key for key in fake.routing_keys if key]


def test_every_request_has_a_routing_key_of_its_own() -> None:
    with FakeService() as fake:
        fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})
        with driver(fake):
            wait_for(lambda: len(fake.generations) >= 6)

    assert len(set(keys_of(fake))) == len(keys_of(fake)) >= 6


@pytest.mark.parametrize("streams", [True, False])
def test_answers_are_counted_whether_the_server_streams_or_not(streams: bool) -> None:
    with FakeService(Arm(empty_share=1.0)) as fake:
        fake.streams = streams
        fake.make_endpoint({BASELINE: 0, CANDIDATE: 100})
        sending = driver(fake)
        with sending:
            wait_for(lambda: len(fake.generations) >= 5)
        counts = sending.counts.take(BASELINE, CANDIDATE)

    assert counts.candidate_requests == counts.candidate_bad["empty"] == len(fake.generations)
    assert (counts.unanswered, counts.candidate_abandoned) == (0, 0)


@pytest.mark.parametrize(
    ("where", "is_counted"), [("after the head", (False, True)), ("before it", (True, False))]
)
def test_a_broken_off_request_is_counted_for_its_deployment_or_for_nobody(
    where: str, is_counted: tuple[bool, bool]
) -> None:
    with FakeService() as fake:
        fake.streams, fake.breaks_off = True, where
        fake.make_endpoint({BASELINE: 0, CANDIDATE: 100})
        sending = driver(fake, max_in_flight=1)
        with sending:
            wait_for(lambda: len(fake.generations) >= 2)  # the first one has been counted by then
            counts = sending.counts.take(BASELINE, CANDIDATE)

    assert (counts.unanswered > 0, counts.candidate_abandoned > 0) == is_counted
    assert (counts.candidate_requests, counts.baseline_abandoned) == (0, 0)
