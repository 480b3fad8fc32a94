"""A third-party program leaves nothing behind when its service dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody hears of it")

WRITES = """
import itertools
for number in itertools.count():
    try:
        open(str(number % 400), "w").close()
    except OSError:
        pass
"""
SERVICE = """
import os, subprocess, sys, time
launch = [sys.executable, "-m", "tuneship.processes.launch", str(os.getpid()), "open"]
program = ["tuneship.processes.external_program", *sys.argv[1:]]
subprocess.Popen([*launch, *program], start_new_session=True)
time.sleep(600)
"""


def test_the_folder_of_a_program_that_writes_into_it_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    program = (str(folder), sys.executable, "-c", WRITES)
    root = {"PYTHONPATH": str(Path(__file__).parents[3])}
    service = subprocess.Popen([sys.executable, "-c", SERVICE, *program], env=os.environ | root)
    try:
        until(lambda: len(list(folder.iterdir())) > 300)
    finally:
        service.kill()
        service.wait()
    until(lambda: not folder.exists())
