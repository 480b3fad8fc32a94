"""A service promises isolation only if its workers are really isolated, on this host and on weaker ones."""

import json
import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.support.service.processes import ROOT, Serve
from tests.support.waiting import PATIENCE_S
from tests.unit.isolation.test_isolation import WITHOUT_LIMIT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing isolates")

# A program that checks isolation as a service does at its start.
ASKS = """
import json, sys, tempfile
from pathlib import Path
from tuneship.service.access.isolation import can_isolate
from tuneship.settings import ServiceSettings
data = Path(sys.argv[1])
for name in ("work", "logs", "scratch"):
    (data / name).mkdir(parents=True, exist_ok=True)
(data / "master.key").write_text("secret")
tempfile.tempdir = str(data / "scratch")
print(json.dumps(can_isolate(ServiceSettings(data_dir=data))))
"""


def asked(data: Path, *on_host: str, **variables: str) -> tuple[bool, str]:
    """Whether workers are isolated there, and the log; `on_host` starts the program on a weaker host."""
    done = subprocess.run(
        [sys.executable, *on_host, "-c", ASKS, str(data)],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return json.loads(done.stdout), done.stderr


def weak_host(*options: str) -> tuple[str, ...]:
    return ("-m", "tests.support.faults.weak_host", *options, sys.executable)


def test_workers_on_this_host_are_isolated(tmp_path: Path) -> None:
    assert asked(tmp_path) == (True, "")
    assert not list((tmp_path / "scratch").iterdir())


def test_a_data_directory_may_have_a_long_path(tmp_path: Path) -> None:
    """The path is longer than a Unix socket's may be, and the check of the isolation needs such a socket."""
    assert asked(tmp_path / ("hospital" * 15)) == (True, "")


def test_a_kernel_without_landlock_withdraws_the_promise(tmp_path: Path) -> None:
    found, log = asked(tmp_path, *weak_host("--no-landlock"))
    assert not found
    assert "no Landlock" in log


def test_a_host_without_filters_withdraws_the_promise(tmp_path: Path) -> None:
    found, log = asked(tmp_path, *weak_host())
    assert not found
    assert "kernel refused" in log


def test_a_data_directory_among_what_workers_read_withdraws_the_promise(tmp_path: Path) -> None:
    """Here Python's module path contains it; it could lie below /usr as well."""
    found, log = asked(tmp_path / "data", PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert not found
    assert "reading master.key" in log
    assert "TCP" not in log


# A program that starts a service until it opens its master key, and prints whether others could read its memory.
AT_THE_KEY = """
import ctypes, os, sys
from pathlib import Path
from tuneship.service import serve
from tuneship.settings import ServiceSettings

def is_opened(event, arguments):
    if event == "open" and str(arguments[0]).endswith("/master.key"):
        os.write(1, b"%d" % ctypes.CDLL(None).prctl(3))  # PR_GET_DUMPABLE
        os._exit(0)

if sys.argv[2] == "open":
    serve.hide = lambda: None
sys.addaudithook(is_opened)
serve.serve(ServiceSettings(data_dir=Path(sys.argv[1]), port=0))
"""


@pytest.mark.parametrize(("mode", "dumpable"), [("hidden", "0"), ("open", "1")])
def test_a_service_is_hidden_before_it_opens_its_key(
    tmp_path: Path, mode: str, dumpable: str
) -> None:
    """The row `open` shows that this test would notice a service that is not hidden."""
    data = tmp_path / "data"
    command = [sys.executable, "-c", AT_THE_KEY, str(data), mode]
    said = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True, timeout=PATIENCE_S
    )
    assert said.stdout == dumpable


class TestAService:
    def test_promises_what_its_workers_keep_and_leaves_no_core_file(self, tmp_path: Path) -> None:
        """The service starts without a limit for core files, which does not bind a program that receives them."""

        def unlimited(module: str, *arguments: str, **options: object) -> "subprocess.Popen[str]":
            run = (
                f"import runpy\nrunpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
            )
            command = [sys.executable, "-W", "ignore", "-c", WITHOUT_LIMIT + run, *arguments]
            return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, **options)  # pyright: ignore[reportCallIssue, reportArgumentType, reportUnknownVariableType]

        serve = Serve(tmp_path / "data", starter=unlimited)
        try:
            answer = httpx.get(f"{serve.url}/healthz").json()
            assert "network_isolation" in json.dumps(answer)
            assert "not isolated" not in serve.log.read_text()
            os.kill(serve.process.pid, 11)
            assert not os.WCOREDUMP(os.waitpid(serve.process.pid, 0)[1])
        finally:
            serve.process.poll()
            serve.stop()
