"""The traffic is returned even if the records folder has become unwritable, and the result says so."""

import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.logging import get_logger
from prefect.states import Failed

from flows.decide_paused import Decision, decide_paused
from flows.guard import guard
from flows.rollout.endings import roll_back
from flows.rollout.record_file import RecordFolder
from flows.rollout.rollback import return_traffic
from flows.rollout.split import PLAIN, RolloutSplit
from flows.shift_traffic import shift_traffic
from tests.flows.conftest import PATIENCE_S, STANDS_STILL, Script, plan, slow_plan, wait_for
from tests.flows.upkeep.test_guard import RETURNED, age, ends, left_at
from tests.support.fakes.canary_service import BASELINE, CANDIDATE, FakeService
from tests.support.repeats import variants
from tuneship.gates.plan import CanaryPlan

pytestmark = [pytest.mark.prefect, pytest.mark.slow]
LOG = get_logger("tests")


def mount(*arguments: str) -> None:
    """Mount as root; on a machine that cannot mount, the test is skipped."""
    done = subprocess.run(["/bin/mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


def read_only(records: Path) -> None:
    """Make the folder readable but not writable by a mount, because `chmod` does not stop root."""
    copy = shutil.copytree(records, records.with_name("copy"), copy_function=shutil.copy2)
    mount("--bind", str(copy), str(records))
    mount("-o", "remount,bind,ro", str(records))


def full(records: Path) -> None:
    """Give the folder a disk of its own that has no free byte."""
    copy = shutil.copytree(records, records.with_name("copy"), copy_function=shutil.copy2)
    mount("-t", "tmpfs", "-o", "size=256k", "tmpfs", str(records))
    shutil.copytree(copy, records, dirs_exist_ok=True, copy_function=shutil.copy2)
    with (records / "filler").open("wb", buffering=0) as filler:
        while True:
            try:
                filler.write(b"x" * 4096)
            except OSError:
                return


def gone(records: Path) -> None:
    """Put a file where the folder was."""
    records.rename(records.with_name("gone"))
    records.touch()


WAYS = [read_only, full, gone]
READABLE = [read_only, full]


@pytest.fixture
def mounted(records: Path) -> Iterator[Path]:
    """The records folder; everything that a test mounts on it is unmounted at the end."""
    records.mkdir(exist_ok=True)
    yield records
    while f" {records} " in Path("/proc/self/mountinfo").read_text():
        subprocess.run(["/bin/umount", "--lazy", str(records)], check=True)


@pytest.mark.parametrize("break_down", variants(WAYS))
def test_a_flow_whose_record_cannot_be_written_gives_the_traffic_back_and_says_so(
    fake: FakeService, mounted: Path, break_down: Callable[[Path], None]
) -> None:
    fake.at_tick[3] = lambda: break_down(mounted)

    result = shift_traffic(plan(steps=[25, 100]))

    assert (result.outcome, result.reason) == ("aborted", "record_not_writable")
    assert fake.weights == RETURNED
    assert [patch.weights.get(CANDIDATE) for patch in fake.patches] == [25, 0]
    assert fake.endpoint is not None
    assert fake.endpoint["lease"] is None
    notes = [note for note in result.notes if "could not be written" in note]
    assert notes
    assert str(mounted) in notes[0]
    assert [change.weights[CANDIDATE] for change in result.history] == [25, 0]


def test_an_error_of_the_flow_gives_the_traffic_back_without_a_record(
    fake: FakeService, mounted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_down(*_: object) -> None:
        read_only(mounted)
        raise ZeroDivisionError

    fake.at_tick[8] = lambda: monkeypatch.setattr("flows.shift_traffic.look_once", break_down)

    with pytest.raises(ZeroDivisionError):
        shift_traffic(plan(steps=[25, 100]))

    assert fake.weights == RETURNED


@pytest.mark.parametrize("break_down", variants(WAYS))
def test_a_decided_rollback_is_sent_and_confirmed_without_a_record(
    fake: FakeService, mounted: Path, break_down: Callable[[Path], None]
) -> None:
    file = left_at(fake, mounted, 25)
    assert fake.endpoint is not None
    split = RolloutSplit(plan(), file, fake.endpoint["version"], LOG, calls=PLAIN)
    break_down(mounted)

    ended = roll_back(split, "error_rate")

    assert (ended.outcome, ended.reason) == ("rolled_back", "error_rate")
    assert fake.weights == RETURNED
    if break_down is not full:  # a disk without a free page may still take a short line
        assert file.unwritten


@pytest.mark.parametrize("break_down", variants(WAYS))
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak)],
)
def test_a_signal_gives_the_traffic_back_without_a_record(
    fake: FakeService,
    mounted: Path,
    run: Callable[[CanaryPlan], Script],
    number: signal.Signals,
    code: int,
    break_down: Callable[[Path], None],
) -> None:
    script = run(slow_plan(look_every_seconds=STANDS_STILL))
    wait_for(lambda: fake.weights.get(CANDIDATE) == 5)
    wait_for(lambda: any("split_confirmed" in one.read_text() for one in mounted.rglob("*.jsonl")))
    break_down(mounted)

    script.process.send_signal(number)

    assert script.process.wait(PATIENCE_S) == code
    assert fake.weights == RETURNED


@pytest.mark.parametrize("break_down", READABLE)
def test_the_state_hook_gives_the_traffic_back_without_a_record(
    fake: FakeService, mounted: Path, break_down: Callable[[Path], None]
) -> None:
    left_at(fake, mounted, 25)
    break_down(mounted)
    flow_run = FlowRun(flow_id=uuid4(), parameters={"plan": plan().model_dump(mode="json")})

    for _ in range(2):
        return_traffic(flow=shift_traffic, flow_run=flow_run, state=Failed())

    assert fake.weights == RETURNED
    assert len(fake.patches) == 1, "the second time nothing is left to do"


@pytest.mark.parametrize("break_down", READABLE)
def test_the_guard_gives_the_traffic_back_without_a_record_and_names_it(
    fake: FakeService, mounted: Path, break_down: Callable[[Path], None]
) -> None:
    file = left_at(fake, mounted, 25)
    break_down(mounted)

    result = guard()

    assert ends(result) == [("aborted", "abandoned")]
    assert fake.weights == RETURNED
    if break_down is read_only:
        assert result.notes == [
            f"the record {file.path} could not be written (Read-only file system)"
        ]
    changes = len(fake.patches)
    guard()
    assert len(fake.patches) == changes


def test_a_roll_back_that_a_person_decides_needs_no_record(
    fake: FakeService, mounted: Path
) -> None:
    fake.silent[CANDIDATE] = "zeros"
    paused = shift_traffic(
        plan(max_looks_per_step=6, wait_for_traffic="0s", on_inconclusive="pause")
    )
    assert paused.outcome == "paused"
    read_only(mounted)
    decision = Decision(
        rollout_id=str(paused.rollout_id), decision="roll back", approver="Ann", reason="unclear"
    )

    result = decide_paused(decision)

    assert (result.outcome, result.reason) == ("rolled_back", "human_rejected")
    assert fake.weights == RETURNED
    assert any("could not be written" in note for note in result.notes)


def test_an_unwritten_line_is_written_with_the_next_one(fake: FakeService, mounted: Path) -> None:
    """A record that becomes writable again gets the return as if it had always been writable."""
    file = left_at(fake, mounted, 25)
    assert fake.endpoint is not None
    split = RolloutSplit(plan(), file, fake.endpoint["version"], LOG, calls=PLAIN)
    gone(mounted)
    ended = roll_back(split, "error_rate")
    mounted.unlink()
    mounted.with_name("gone").rename(mounted)

    file.append_if_possible(ended)

    assert file.unwritten == []
    assert RecordFolder(mounted, fake.url).file(file.path.stem).record == file.record
    assert guard().outcome == "nothing_to_do"


def test_a_return_that_no_record_tells_of_is_not_gone_on_with(
    fake: FakeService, mounted: Path
) -> None:
    """The process died after the return; whoever finds the record at 25 % reads the split and closes the record."""
    left_at(fake, mounted, 25)
    fake.change_from_outside(RETURNED)

    result = shift_traffic(plan())

    assert (result.outcome, result.reason) == ("rolled_back", "lease_expired")
    assert fake.weights == RETURNED


def test_records_that_cannot_be_read_or_written_stop_no_other(
    fake: FakeService, records: Path
) -> None:
    """The endpoint's own record comes last; each of the others is broken in a different way."""
    file = left_at(fake, records, 25)
    folder = file.path.parent
    names = [folder / f"rollout-0000-000{number}.jsonl" for number in range(1, 5)]
    names[0].mkdir()
    names[1].write_bytes(b"{}\n{}\n")
    names[2].symlink_to(names[2])
    names[3].write_bytes(file.path.read_bytes().replace(b'"approval":"never"', b'"approval":1'))
    releases = records / "releases"
    (releases / "0000-1.jsonl").mkdir(parents=True)
    for name in names:
        if name.is_file():
            age(name, hours=2)

    result = guard()

    assert ends(result) == [("aborted", "abandoned")]
    assert fake.weights == RETURNED
    for path in (*names, releases / "0000-1.jsonl"):
        assert [note for note in result.notes if str(path) in note], path
    assert len(result.notes) == 5
    assert guard().notes == result.notes


def test_a_records_folder_that_cannot_be_read_is_named_by_the_guard(
    fake: FakeService, mounted: Path
) -> None:
    left_at(fake, mounted, 25)
    gone(mounted)

    result = guard()

    assert result.outcome == "nothing_to_do"
    assert any(str(mounted) in note and "cannot be read" in note for note in result.notes)


def test_nothing_moves_where_no_record_can_be_begun(fake: FakeService, mounted: Path) -> None:
    read_only(mounted)
    fake.make_endpoint({BASELINE: 100, CANDIDATE: 0})

    with pytest.raises(OSError, match="Read-only file system"):
        shift_traffic(plan())

    assert fake.patches == []
