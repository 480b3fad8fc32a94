"""Tests of how much of its machine the service may use, and of how many more processes fit on it."""

import os
from pathlib import Path

from tuneship.host.machine import (
    more_processes,
    resident_memory,
    this_machine,
)
from tuneship.host.memory import Container, MemoryFiles, free_memory

GIB = 1 << 30


def test_the_limit_of_a_container_counts(tmp_path: Path) -> None:
    limit, used, parts = (tmp_path / name for name in ("limit", "used", "parts"))
    used.write_text("1048576\n")
    none = Container(tmp_path / "none", used, parts, "inactive_file")
    files = MemoryFiles(containers=(Container(limit, used, parts, "inactive_file"), none))
    whole = this_machine(files).memory_bytes
    limit.write_text("max\n")
    assert this_machine(files).memory_bytes == whole
    limit.write_text("3145728\n")
    assert this_machine(files).memory_bytes == 3 << 20
    assert free_memory(files) == 2 << 20
    used.write_text("4194304\n")
    assert free_memory(files) == 0
    parts.write_text("file 4000000\nactive_file 1\ninactive_file 2097152\n")
    assert free_memory(files) == 1 << 20, "copies of files that nobody reads are given up"


def test_as_many_processes_fit_as_the_free_memory_holds(tmp_path: Path) -> None:
    own = resident_memory(os.getpid())
    assert 1 << 20 < own < 100 * GIB
    limit, used, whole = (tmp_path / name for name in ("limit", "used", "whole"))
    limit.write_text(str(100 * GIB))
    # This much memory is free, whatever else runs here.
    whole.write_text(f"MemAvailable: {100 * GIB >> 10} kB\n")
    files = MemoryFiles(whole, (Container(limit, used, tmp_path / "none", "x"),))
    for share, number in ((2.5, 2), (0.5, 0)):
        used.write_text(str(100 * GIB - int(share * own)))
        assert more_processes([os.getpid(), 0], usable_share=1.0, files=files) == number
    assert more_processes([]) == 1
