"""Processes are recorded when they start, and no process but the recorded one is ever ended."""

import json
import os
import re
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from pydantic import SecretStr

from deployments.background_processes import AtWork, NotStarted, ProcessFolder, RecordedProcess
from deployments.local import Local
from tests.support.service.in_process import Service
from tuneship.settings import ClientSettings, LocalSettings, ServiceSettings

PORTS = ("TUNESHIP_PORT", "TUNESHIP_PREFECT_PORT", "TUNESHIP_BRIDGE_PORT")
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


def test_a_process_is_started_known_and_ended(tmp_path: Path) -> None:
    processes = ProcessFolder(tmp_path)
    processes.start("one", SLEEP, os.environ, lambda: True)
    running = processes.running("one")
    assert running is not None
    assert ProcessFolder(tmp_path).running("one") == running
    assert processes.stop("one")
    assert not running.is_alive
    assert not processes.stop("one")


def test_a_process_obeys_sigint_even_when_a_background_job_starts_it(tmp_path: Path) -> None:
    processes = ProcessFolder(tmp_path)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for its background jobs
    try:
        processes.start("one", SLEEP, os.environ, lambda: True)
    finally:
        signal.signal(signal.SIGINT, before)
    running = processes.running("one")
    assert running is not None
    status = Path(f"/proc/{running.pid}/status").read_text()
    (ignored,) = re.findall(r"^SigIgn:\s*(\S+)$", status, flags=re.MULTILINE)
    assert not int(ignored, 16) & 1 << signal.SIGINT - 1
    assert processes.stop("one")


def test_a_process_that_ends_before_it_is_ready_is_an_error_with_its_last_words_and_log(
    tmp_path: Path,
) -> None:
    processes = ProcessFolder(tmp_path)
    processes.log("one").write_text("of an earlier start\n")
    for program, said in (
        ("print('the port is taken')", "the port is taken"),
        ("", "no message"),
    ):
        with pytest.raises(NotStarted, match=rf"{said} \(log: .*one\.log\)"):
            processes.start("one", (sys.executable, "-c", program), os.environ, lambda: False)
    assert processes.running("one") is None


def test_a_process_that_cannot_be_recorded_does_not_stay(tmp_path: Path) -> None:
    processes = ProcessFolder(tmp_path)
    (tmp_path / "one.json").mkdir()  # writing the record fails, as it would on a full disk
    before = children()
    with pytest.raises(OSError, match=r"one\.json"):
        processes.start("one", SLEEP, os.environ, lambda: True)
    assert not children() - before


def children() -> set[str]:
    """Ids of this process's children, including ended ones that nobody has waited for."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread of another test has just ended
            found.update((task / "children").read_text().split())
    return found


def test_an_interrupted_wait_leaves_nothing(tmp_path: Path) -> None:
    processes = ProcessFolder(tmp_path)
    recorded: list[RecordedProcess | None] = []

    def interrupt() -> bool:
        recorded.append(processes.running("one"))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        processes.start("one", SLEEP, os.environ, interrupt)
    assert recorded[0] is not None
    assert not recorded[0].is_alive
    assert processes.running("one") is None


def test_two_commands_do_not_work_on_a_folder_at_once(tmp_path: Path) -> None:
    mine, theirs = ProcessFolder(tmp_path), ProcessFolder(tmp_path)
    with mine.alone(), pytest.raises(AtWork, match=str(tmp_path)), theirs.alone():
        pass
    with theirs.alone():
        pass


def test_a_process_id_that_somebody_else_has_now_is_left_alone(tmp_path: Path) -> None:
    processes = ProcessFolder(tmp_path)
    (tmp_path / "one.json").write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    assert processes.running("one") is None
    assert not processes.stop("one")  # otherwise it would have killed this test


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"pid": "x"}'])
def test_an_unreadable_record_is_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.json").write_text(text)
    assert ProcessFolder(tmp_path).running("one") is None


@pytest.mark.parametrize("setting", PORTS)
def test_nothing_is_started_where_a_port_is_taken(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for part in ("run_dir", "prefect_dir", "bridge_secret_file", "data_dir"):
        monkeypatch.setenv(f"TUNESHIP_{part.upper()}", str(tmp_path / part))
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    for name, listener in zip(PORTS, listeners, strict=True):
        monkeypatch.setenv(name, str(listener.getsockname()[1]))
        if name != setting:
            listener.close()
    with pytest.raises(NotStarted, match=rf"{setting} chooses another one"):
        Local(LocalSettings(), ServiceSettings()).up()
    for listener in listeners:
        listener.close()
    assert not list(tmp_path.glob("run_dir/*.log"))
    assert not (tmp_path / "data_dir").exists()


def test_a_service_whose_address_is_not_written_down_is_an_error_that_names_the_file(
    tmp_path: Path,
) -> None:
    local = Local(LocalSettings(), ServiceSettings(data_dir=tmp_path))
    with pytest.raises(NotStarted, match=r"service\.json does not name the service's URL"):
        local._client()


def test_a_service_that_may_not_call_the_bridge_learns_how_to_start(tmp_path: Path) -> None:
    """A service that was started by a script, for example, does not allow calls to the bridge."""
    local = Local(LocalSettings(bridge_port=14_299), ServiceSettings())
    with Service(tmp_path) as service:
        service.listen()
        key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        client = ClientSettings(url=service.url, api_key=SecretStr(key), client_id="alice")
        setting = r"TUNESHIP_WEBHOOK_ALLOW_HTTP_HOSTS=127\.0\.0\.1:14299"
        with pytest.raises(NotStarted, match=setting):
            local._connect_bridge(client)


def test_a_file_that_holds_no_string_of_a_prefect_server_is_an_error_that_names_it(
    tmp_path: Path,
) -> None:
    local = Local(LocalSettings(run_dir=tmp_path), ServiceSettings())
    local.auth_file.write_text("a password alone\n")
    with pytest.raises(NotStarted, match=rf"{local.auth_file} needs one line"):
        local._auth_string()


@pytest.mark.parametrize(
    ("noted", "whose"), [("/srv/another\n", "the project /srv/another"), ("", "an earlier version")]
)
def test_an_up_beside_processes_that_are_not_its_own_starts_nothing(
    tmp_path: Path, noted: str, whose: str
) -> None:
    processes = ProcessFolder(tmp_path)
    processes.start("worker", SLEEP, os.environ, lambda: True)
    if noted:
        (tmp_path / "project").write_text(noted)
    try:
        with pytest.raises(NotStarted, match=f"the processes of {whose} run"):
            Local(LocalSettings(run_dir=tmp_path), ServiceSettings(data_dir=tmp_path)).up()
        assert processes.running("service") is None
    finally:
        processes.stop("worker")
