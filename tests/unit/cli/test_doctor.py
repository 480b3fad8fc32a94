"""`tuneship doctor` says what the machine can do, and whether a model of a given size fits."""

import json
import os
import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.service.processes import ROOT
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


# What the first column of both tables names.
SIZES = {"0.1 B": "135M", "0.5 B": "494M", "1.5 B": "1.54B", "8 B": "8.03B"}


@pytest.mark.parametrize(
    ("page", "columns"),
    [
        ("README.md", {"to train it": 1, "a replica": 3}),
        ("docs/first-release.md", {"to add it": 1, "to train it": 2, "a replica": 5}),
    ],
)
def test_the_tables_of_the_documentation_say_what_it_says(
    page: str, columns: dict[str, int]
) -> None:
    rows = re.findall(r"^\| (\d\S* B\b.*) \|$", (ROOT / page).read_text(), re.MULTILINE)
    cells = [row.split(" | ") for row in rows]
    assert [" ".join(row[0].split()[:2]) for row in cells] == list(SIZES)
    for row, size in zip(cells, SIZES.values(), strict=True):
        _, needs = found("--parameters", size)
        for what, column in columns.items():
            computed = float(needs[what][0].split()[1])
            written = re.findall(r"(\*\*)?([\d.]+) GiB", row[column])[0]
            is_measured, gib = bool(written[0]), float(written[1])
            tolerance = 0.11 * gib if is_measured else 0.5
            assert computed == pytest.approx(gib, abs=tolerance), (size, what)


def test_a_training_needs_no_more_than_one_row_of_a_step() -> None:
    _, rows = found("--parameters", "1.54B")
    text = "about 8.0 GiB of memory for steps of 16 rows of 60 tokens, at least 4.0 GiB"
    assert rows["to train it"][0] == text


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
