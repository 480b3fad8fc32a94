"""The lines of the pipeline's records reach the service exactly once, whatever happens to the sender and its answers.

The service is a fake that obeys the contract; the records are real files, written as the flows write them.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from flows.release.record_file import ReleaseRecord
from flows.rollout.record_file import RecordFile
from flows.shared import release_events
from flows.shared.journal import Journal
from flows.shared.release_events import finish, publish, publish_left
from flows.shared.release_lines import MAX_BYTES, name_of, sendable
from tests.flows.conftest import PATIENCE_S, plan, use
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, Refusal
from tests.support.fakes.release_service import ReleaseService
from tests.support.waiting import until
from tuneship.gates.record import (
    ApprovalAnswered,
    ApprovalAsked,
    Begun,
    Ended,
    Fact,
    Look,
    Phase,
    Probed,
    SplitConfirmed,
    SplitIntended,
    Verdict,
)
from tuneship.prefect.connection import disconnect

NOW = datetime(2026, 1, 5, 8, 0, tzinfo=UTC)
PLANTED = "PLANTED/patient"
WANTED = plan(
    approval="required", traffic={"prompts": f"/data/{PLANTED}.jsonl", "requests_per_second": 1}
)
BEGUN = Begun("rollout-0-0001", "cep_shop", WANTED.model_dump(mode="json"), WANTED.digest(), ())


def look(number: int) -> Look:
    return Look(
        number=number,
        phase=Phase.COMPARE,
        weight=50,
        verdict=Verdict.HOLD,
        at=NOW,
        horizon=None,
        missing=None,
        standing=False,
        step_buckets=1,
        brought_data=True,
        newest_baseline=None,
        newest_candidate=None,
        limits=None,
        baseline_status="running",
        candidate_status="running",
        candidate_replicas=1,
        plan_digest=BEGUN.plan_hash,
    )


FACTS: Sequence[Fact] = (
    BEGUN,
    SplitIntended(50, "first step"),
    SplitConfirmed(50, NOW, 2),
    Probed(10, 10),
    look(1),
    ApprovalAsked(NOW, "7c1e5b0a", NOW),
    ApprovalAnswered("promote", "Ann", f"see {PLANTED}"),
    Ended("promoted", "none"),
)
OWN: Sequence[tuple[str, dict[str, Any]]] = (
    ("begun", {"endpoint_id": None, "endpoint_name": "shop", "service": f"/home/{PLANTED}"}),
    ("release", {"digest": "d" * 64}),
    ("candidate", {"id": CANDIDATE}),
    ("training_gates", {"gates": [{"name": "T1 finite", "state": "pass", "note": PLANTED}]}),
    ("held_gates", {"question": "1", "approver": "Ann", "said": PLANTED, "comment": PLANTED}),
    ("rollout", {"plan": WANTED.model_dump(mode="json"), "notes": [PLANTED], "known": {"x": 1}}),
    ("of_a_newer_pipeline", {"text": PLANTED}),
    ("ended", {"outcome": "promoted", "reason": "none"}),
)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[ReleaseService]:
    """A fake service that takes releases, used by this process."""
    with ReleaseService() as running:
        use(running)
        yield running
    die()
    disconnect()


@pytest.fixture
def own(tmp_path: Path) -> ReleaseRecord:
    """The record of a release, without lines."""
    return ReleaseRecord(tmp_path / "releases" / "abc-1.jsonl")


@pytest.fixture
def rollout(tmp_path: Path) -> RecordFile:
    """The record of a rollout, without lines."""
    return RecordFile(tmp_path / "here" / "rollout-0-0001.jsonl")


def write_own(record: ReleaseRecord, start: int = 0, end: int | None = None) -> None:
    for kind, fields in OWN[start:end]:
        record.add(kind, NOW, **({"run_key": "key 1"} if kind == "begun" else {}), **fields)


def die() -> None:
    """Let the sender of this process end as a kill does, without a last request."""
    for sender in release_events._senders:
        sender.news.put(None)
        sender.join(PATIENCE_S)
    release_events._senders.clear()


def expected(path: Path) -> list[dict[str, Any]]:
    return [sendable(path, line) for line in path.read_bytes().splitlines()]


def stored(service: ReleaseService, path: Path) -> list[dict[str, Any]]:
    """All lines that the service has of a record; it has them in one release only."""
    name = name_of(path, path.read_bytes().splitlines()[0])
    found = [lines[name] for lines in service.lines.values() if name in lines]
    assert len(found) <= 1
    return found[0] if found else []


def is_complete(service: ReleaseService, *paths: Path) -> bool:
    return all(stored(service, path) == expected(path) for path in paths)


def test_a_release_has_the_lines_of_its_own_record_and_of_its_rollout(
    service: ReleaseService, own: ReleaseRecord, rollout: RecordFile
) -> None:
    write_own(own, 0, -1)
    rollout.append(*FACTS)
    write_own(own, -1)

    until(lambda: is_complete(service, own.path, rollout.path))

    ((release_id, announced),) = service.releases.items()
    assert (announced["kind"], announced["run_key"]) == ("release", "key 1")
    assert len(service.lines[release_id]) == 2


def test_a_rollout_by_itself_is_announced_as_one(
    service: ReleaseService, rollout: RecordFile
) -> None:
    rollout.append(*FACTS)
    until(lambda: is_complete(service, rollout.path))
    (announced,) = service.releases.values()
    assert (announced["kind"], announced["endpoint_id"]) == ("rollout", "cep_shop")
    assert announced["endpoint_name"] == "shop"


def test_no_path_and_no_text_of_a_person_is_sent(
    service: ReleaseService, own: ReleaseRecord, rollout: RecordFile
) -> None:
    write_own(own)
    rollout.append(*FACTS)
    until(lambda: is_complete(service, own.path, rollout.path))

    sent = json.dumps([service.releases, service.lines])

    assert (PLANTED in own.path.read_text(), PLANTED in rollout.path.read_text()) == (True, True)
    assert PLANTED not in sent
    assert sent.count("Ann") == 2, "the name of who decided is sent"
    assert "of_a_newer_pipeline" in sent


@pytest.mark.parametrize("killed_after", range(1, len(FACTS) + 1))
def test_a_sender_that_is_killed_behind_any_line_is_gone_on_with(
    service: ReleaseService, rollout: RecordFile, killed_after: int
) -> None:
    service.line_script = ["lose"]  # the kill comes before the answer
    rollout.append(*FACTS[:killed_after])
    until(lambda: service.sizes != [])
    die()

    again = RecordFile(rollout.path)
    again.append(*FACTS[killed_after:], Ended("promoted", "none"))

    until(lambda: is_complete(service, rollout.path))


def test_lost_answers_and_failures_send_no_line_twice(
    service: ReleaseService, own: ReleaseRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release_events, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(release_events, "LONGEST_PAUSE_S", 0.01)
    service.line_script = ["lose", "fail", "lose", "ok", "fail", "lose"] * 2
    for number in range(len(OWN)):
        write_own(own, number, number + 1)
        until(lambda number=number: len(stored(service, own.path)) == number + 1)
    until(lambda: is_complete(service, own.path))


def test_two_senders_store_each_line_once(service: ReleaseService, rollout: RecordFile) -> None:
    rollout.append(FACTS[0])
    until(lambda: is_complete(service, rollout.path))
    (first,) = release_events._senders
    release_events._senders.clear()
    for fact in FACTS[1:]:
        rollout.append(fact)
        first.news.put(
            release_events._News(rollout.path, rollout.path.stat().st_size, can_wait=False)
        )
    until(lambda: is_complete(service, rollout.path))
    assert first is not release_events._senders[0]
    first.news.put(None)
    first.join(PATIENCE_S)


def test_a_sender_that_is_behind_another_one_numbers_its_lines_as_the_file(
    service: ReleaseService, rollout: RecordFile
) -> None:
    rollout.append(*FACTS[:5])
    until(lambda: is_complete(service, rollout.path))
    die()
    first_two = b"".join(rollout.path.read_bytes().splitlines(keepends=True)[:2])
    publish(rollout.path, len(first_two), [""])
    finish()
    rollout.append(*FACTS[5:])
    until(lambda: is_complete(service, rollout.path))


def test_a_service_that_was_restored_from_a_backup_gets_what_it_lost(
    service: ReleaseService, own: ReleaseRecord
) -> None:
    write_own(own, 0, 6)
    until(lambda: is_complete(service, own.path))
    (lines,) = service.lines.values()
    next(iter(lines.values()))[2:] = []

    write_own(own, 6)

    until(lambda: is_complete(service, own.path))
    service.releases.clear()  # from one of before the release
    service.lines.clear()
    own.add("model_card", NOW, sha256="d" * 64)
    until(lambda: is_complete(service, own.path))


@pytest.mark.parametrize("status", [403, 404])
def test_a_service_that_takes_no_releases_is_asked_once(
    service: ReleaseService, own: ReleaseRecord, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    service.refusal = Refusal(status, "permission_denied")
    write_own(own, 0, 4)
    (sender,) = release_events._senders
    sender.join(PATIENCE_S)

    write_own(own, 4)
    finish()

    assert service.release_calls == ["POST"]
    assert len([one for one in caplog.records if "takes no records" in one.message]) == 1


def test_an_outage_costs_the_writer_nothing_and_the_process_two_seconds(
    service: ReleaseService, own: ReleaseRecord
) -> None:
    service.__exit__()
    began = time.monotonic()
    write_own(own)
    written = time.monotonic()
    finish()
    assert written - began < 1.0
    assert time.monotonic() - written < release_events.FINISH_WITHIN_S + 1.0


def test_the_end_of_a_process_waits_for_its_last_lines(
    service: ReleaseService, rollout: RecordFile
) -> None:
    rollout.append(*FACTS[:3])
    until(lambda: is_complete(service, rollout.path))
    rollout.append(FACTS[3], FACTS[4])  # these may wait for two seconds
    finish()
    assert is_complete(service, rollout.path)


def test_looks_are_sent_together_and_a_split_takes_them_along(
    service: ReleaseService, rollout: RecordFile
) -> None:
    rollout.append(*FACTS[:3])
    until(lambda: is_complete(service, rollout.path))
    for number in range(1, 251):
        rollout.append(Probed(1, 1), look(number))
    rollout.append(SplitIntended(100, "advance"))
    until(lambda: is_complete(service, rollout.path))
    assert max(service.sizes) == 100
    assert len(service.sizes) < 50


def test_a_file_that_lost_lines_is_given_up(
    service: ReleaseService, own: ReleaseRecord, caplog: pytest.LogCaptureFixture
) -> None:
    write_own(own, 0, 2)
    until(lambda: is_complete(service, own.path))
    publish(own.path, own.path.stat().st_size + 10, [""])
    finish()
    assert [one.message for one in caplog.records if "does not get" in one.message]
    assert len(service.sizes) <= 2


def test_a_line_that_cannot_be_read_or_sent_keeps_its_place(
    service: ReleaseService, own: ReleaseRecord
) -> None:
    write_own(own, 0, 2)
    journal = Journal(own.path, written=publish)
    journal.append("{", json.dumps({"kind": "job", "id": "x" * MAX_BYTES}), '{"kind": 1}')
    write_own(own, 2)
    until(lambda: is_complete(service, own.path))
    kinds = [line["kind"] for line in stored(service, own.path)]
    assert kinds[:6] == ["begun", "release", *3 * ["unreadable"], "candidate"]


def test_a_number_that_json_lacks_is_no_number(service: ReleaseService, own: ReleaseRecord) -> None:
    write_own(own, 0, 1)
    own.add(
        "smoke_test", NOW, gates=[{"name": "T10 smoke", "state": "hold", "value": float("nan")}]
    )
    until(lambda: is_complete(service, own.path))
    assert stored(service, own.path)[1]["gates"][0]["value"] is None


def test_the_guard_sends_what_a_dead_run_left_and_asks_for_nothing_else(
    service: ReleaseService, own: ReleaseRecord, rollout: RecordFile
) -> None:
    disconnect()  # the run wrote while nobody published
    write_own(own)
    rollout.append(*FACTS)
    use(service)
    paths = (own.path, rollout.path)
    silent = datetime.now(UTC) + timedelta(minutes=5)

    publish_left(paths, datetime.now(UTC))
    assert service.release_calls == [], "its writer may be alive"
    publish_left([Path("/nowhere"), *paths], silent)
    until(lambda: is_complete(service, *paths))

    service.release_calls.clear()
    publish_left(paths, silent)
    publish_left(paths, silent + timedelta(days=2))
    service.refusal = Refusal(404, "resource_not_found")
    publish_left(paths, silent)
    finish()
    assert service.release_calls == ["GET", "GET"], "one for each look at recent records"


WRITER = """
import sys
from pathlib import Path
from flows.rollout.record_file import RecordFile
from tests.flows.shared.test_release_events import FACTS
from tuneship.prefect.connection import connect
from tuneship.settings import ClientSettings

connect(ClientSettings(url=sys.argv[2], api_key="key", client_id="tests"))
file = RecordFile(Path(sys.argv[1]))
for fact in FACTS[len(file.record.facts):]:
    file.append(fact)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_process_that_is_killed_leaves_the_rest_to_the_next_one(
    service: ReleaseService, rollout: RecordFile
) -> None:
    command = [sys.executable, "-c", WRITER, str(rollout.path), service.url]
    root = Path(__file__).parents[3]
    for wanted in (3, 6):
        writer = subprocess.Popen(command, stdin=subprocess.PIPE, cwd=root)
        assert writer.stdin is not None
        while len(stored(service, rollout.path) if rollout.path.exists() else ()) < wanted:
            assert writer.poll() is None
            writer.stdin.write(b"\n")
            writer.stdin.flush()
            time.sleep(0.05)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdin.close()
    ended = subprocess.run(command, input=b"\n" * len(FACTS), cwd=root, check=False)
    assert ended.returncode == 0
    assert is_complete(service, rollout.path), "the last process sends the rest before it ends"
    assert BASELINE in json.dumps(service.lines)


def test_no_connection_stays_open_that_the_sender_was_opening_at_the_end(
    service: ReleaseService, own: ReleaseRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, opened, is_connecting = socket.create_connection, list[socket.socket](), Event()

    def slowly(*given: Any, **named: Any) -> socket.socket:
        is_connecting.set()
        time.sleep(0.2)
        opened.append(connect(*given, **named))
        return opened[-1]

    monkeypatch.setattr(socket, "create_connection", slowly)
    write_own(own)
    assert is_connecting.wait(PATIENCE_S)
    (sender,) = release_events._senders
    disconnect()
    sender.news.put(None)
    sender.join(PATIENCE_S)
    assert opened
    assert all(one.fileno() == -1 for one in opened)
