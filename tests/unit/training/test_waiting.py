"""A process that waits for a job has loaded its libraries, but read no file of a tenant, when the order comes."""

import ctypes
import json
import os
import shutil
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.waiting import until
from tuneship.training.spec import Order

if TYPE_CHECKING:
    from tests.unit.training.conftest import Job, JobMaker

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# Flags of inotify: IN_OPEN, IN_ACCESS.
OPENED_OR_READ = 0x20 | 0x1
OVERFLOW = 0x4000
# Program that writes down the loaded modules before the order is read, and when the job is done.
NOTES_MODULES = """
import json, os, pathlib, sys
import tuneship.training.__main__ as trainer

def note(name):
    part = pathlib.Path({folder!r}, name + ".part")
    part.write_text(json.dumps(sorted(sys.modules)))
    part.rename(part.with_suffix(""))

def noting(descriptor, read=trainer.read_order):
    note("waiting")
    return read(descriptor)

trainer.read_order = noting
code = trainer.main(sys.argv[1:])
note("ended")
sys.exit(code)
"""


class Watch:
    """Records which files below a folder are opened or read, by any process and in any language."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._events >= 0
        folders = [folder, *(one for one in folder.rglob("*") if one.is_dir())]
        self._watched = {self._add(one): one for one in folders}

    def _add(self, folder: Path) -> int:
        number = self._libc.inotify_add_watch(self._events, bytes(folder), OPENED_OR_READ)
        assert number >= 0, os.strerror(ctypes.get_errno())
        return number

    def accessed(self) -> set[Path]:
        """Return the files that were opened or read since the last call."""
        found: set[Path] = set()
        while events := self._read():
            while events:
                number, mask, _, length = struct.unpack_from("iIII", events)
                assert not mask & OVERFLOW
                name = events[16 : 16 + length].rstrip(b"\0").decode()
                found.add(self._watched[number] / name)
                events = events[16 + length :]
        return found

    def _read(self) -> bytes:
        try:
            return os.read(self._events, 1 << 16)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self._events)


class Waiting:
    """A training process without an order yet. Without `waits` it was started for one job."""

    def __init__(self, notes: Path, *, waits: bool = True) -> None:
        self._notes = notes
        theirs, self._line = os.pipe()
        program = NOTES_MODULES.format(folder=str(notes))
        arguments = ["--wait" if waits else "WORK_DIR", str(theirs)]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", program, *arguments],
            cwd=ROOT,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
            pass_fds=[theirs],
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs)

    def order(self, job: "Job") -> None:
        os.write(self._line, Order(job.directory).to_line().encode())

    def modules(self, moment: str) -> set[str]:
        """Wait for this moment, and return the modules that were loaded then."""
        file = self._notes / moment
        until(lambda: file.exists() or self.process.poll() is not None)
        return set(json.loads(file.read_text()))

    def close(self) -> None:
        os.close(self._line)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder outside of the watched one."""
    return tmp_path_factory.mktemp("notes")


@pytest.mark.soak
def test_nothing_of_a_tenant_is_read_before_the_order_and_all_is_imported_by_then(
    make_job: "JobMaker", tiny_model: Path, tmp_path: Path, notes: Path
) -> None:
    """All files of the job exist meanwhile: spec, rows, and a base model that may belong to a tenant."""
    job = make_job(base_model=str(shutil.copytree(tiny_model, tmp_path / "base")))
    with closing(Watch(tmp_path)) as watch, closing(Waiting(notes)) as waiting:
        loaded = waiting.modules("waiting")
        assert watch.accessed() == set()

        waiting.order(job)
        later = waiting.modules("ended") - loaded
        read = {make_job.training_file, make_job.validation_file, job.directory / "spec.json"}
        assert read | {tmp_path / "base" / "model.safetensors"} <= watch.accessed()
    assert job.lines()[-1]["kind"] == "completed"

    assert {"torch", "transformers", "peft", "tokenizers", "safetensors"} <= loaded
    assert {name.partition(".")[0] for name in later} <= {name.partition(".")[0] for name in loaded}
    assert len(later) < len(loaded) / 100, sorted(later)


def test_a_process_for_one_job_loads_no_library_before_its_order(
    make_job: "JobMaker", notes: Path
) -> None:
    """A waiting process saves this time: here the same libraries are loaded after the order."""
    job = make_job()
    with closing(Waiting(notes, waits=False)) as cold:
        loaded = cold.modules("waiting")
        cold.order(job)
        later = cold.modules("ended") - loaded
    assert job.lines()[-1]["kind"] == "completed"
    assert {"torch", "transformers", "peft"} <= later
