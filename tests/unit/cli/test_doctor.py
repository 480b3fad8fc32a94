"""`tuneship doctor` says what the machine can do, and whether a model of a given size fits."""

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tuneship.cli.main import app


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUNESHIP_DATA_DIR", str(tmp_path / "not" / "there"))
    monkeypatch.setenv("TUNESHIP_MINIMUM_FREE_DISK_BYTES", "0")
    monkeypatch.setenv("TUNESHIP_MINIMUM_FREE_DISK_SHARE", "0")


def found(*arguments: str) -> tuple[int, dict[str, tuple[str, bool]]]:
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    rows = json.loads(result.output)
    return result.exit_code, {row["what"]: (row["found"], row["fits"]) for row in rows}


def test_the_machine_is_that_of_the_kernel() -> None:
    code, rows = found()
    assert rows["cores"] == (str(len(os.sched_getaffinity(0))), True)
    kibibytes = int(Path("/proc/meminfo").read_text().split()[1])
    assert float(rows["memory"][0].split()[0]) <= kibibytes / 2**20 + 0.1
    assert ("avx2" in Path("/proc/cpuinfo").read_text()) == ("avx2" in rows["processor"][0])
    assert code == (0 if all(fits for _, fits in rows.values()) else 4)


def test_a_model_that_does_not_fit_is_marked() -> None:
    code, rows = found("--parameters", "900B")
    assert (code, rows["a replica"][1], rows["to train it"][1]) == (4, False, False)
    _, small = found("--parameters", "1m")
    assert small["a replica"] == ("about 0.2 GiB of memory", True)


def test_a_port_in_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("TUNESHIP_PORT", str(port))
        assert found()[1]["port"] == (f"127.0.0.1:{port}: Address already in use", True)


@pytest.mark.parametrize("size", ["", "1", "1.5", "B", "-1B", "1e9B", "nanB"])
def test_a_size_that_cannot_be_read_is_refused(size: str) -> None:
    result = CliRunner().invoke(app, ["doctor", "--parameters", size])
    assert result.exit_code == 2
    assert "--parameters: must be a number with M or B" in result.output


def test_gpu_libraries_without_a_gpu_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["nvidia-nccl-cu13==2.28.9; platform_system == 'Linux'"]
    monkeypatch.setattr("tuneship.cli.commands.doctor.metadata.requires", lambda _: needs)
    _, rows = found()
    has_gpu = rows["GPUs"][0] != "0"
    assert ("its CPU build saves several GB" in rows["service"][0]) != has_gpu
