"""Trackers run in processes of their own: none can hold up, crash or double what called it."""

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from wandb.proto import wandb_internal_pb2

from tests.support.service.processes import ROOT
from tests.support.waiting import PATIENCE_S
from tests.unit.tracking.runs import released, tracked, written_report
from tuneship.tracking.outside import write_outside
from tuneship.tracking.tracked_run import TrackingTarget

pytestmark = pytest.mark.slow

# The format of wandb's files: a header, then chunks that do not cross the end of a block.
HEADER = 7
BLOCK = 32 * 1024
CHUNK_HEADER = 7
WHOLE, LAST = 1, 4


def test_a_server_that_never_answers_is_given_up_while_the_others_write(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        hanging = TrackingTarget(tracker="mlflow", place=f"http://127.0.0.1:{port}", group="g")
        [report] = write_outside([tracked()], [hanging], 0.5)
    assert report.problem == "not done within 0.5 s"
    assert report.place is None


def test_a_folder_that_cannot_be_written_is_a_problem_of_that_tracker_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bad = TrackingTarget(tracker="tensorboard", place=str(tmp_path / "file"), group="")
    good = TrackingTarget(tracker="tensorboard", place=str(tmp_path / "logs"), group="")
    failed, written = write_outside([tracked()], [bad, good], PATIENCE_S)
    assert (failed.problem or "").startswith("NotADirectoryError")
    assert Path(written.place or "").is_file()


def test_an_offline_run_of_wandb_is_read_back_and_replaced_when_it_is_written_again(
    tmp_path: Path,
) -> None:
    target = TrackingTarget(tracker="wandb", place=str(tmp_path / "runs"), group="chapters")
    run = tracked()
    [first] = write_outside([run], [target], PATIENCE_S)
    release = released("promoted", run.model, written_report(tmp_path / "report"))
    [again] = write_outside([run.model_copy(update={"release": release})], [target], PATIENCE_S)
    assert first.problem is None
    assert again.problem is None
    folders = list((tmp_path / "runs" / "wandb").glob("offline-run-*"))
    assert folders == [Path(again.place or "")]
    [kept] = write_outside([run], [target], PATIENCE_S)
    assert kept.place == again.place, "an export must not take the release away"
    assert (folders[0] / "files" / "release" / "report.md").read_text() == "# Release\n"
    for name in ("loss.png", "model_card.md", "model_card.json"):
        assert (folders[0] / "files" / "release" / name).is_file()
    assert not (folders[0] / "files" / "wandb-metadata.json").exists()
    records = records_of(folders[0] / "run-ft_first.wandb")
    assert points_of(records, "training_loss") == [(1, 2.0), (2, 1.5), (3, 1.25)]
    assert points_of(records, "validation_loss") == [(1, 2.25), (3, 1.5)]
    [started] = [one.run for one in records if one.WhichOneof("record_type") == "run"]
    assert (started.run_id, started.project) == ("ft_first", "chapters")
    assert started.host == ""
    config = {one.key: one.value_json for one in started.config.update}
    assert config["hyperparameters.learning_rate"] == "0.01"
    assert "a" * 64 in config["datasets"]


@pytest.mark.soak
def test_no_tracker_tells_its_maker_that_it_is_used(tmp_path: Path) -> None:
    """Ask the libraries themselves, outside of the tests' environment, in which they would be silent anyway."""
    program = (
        "import sys\n"
        "from tuneship.tracking.__main__ import turn_off_telemetry\n"
        "assert not {'mlflow', 'wandb'} & set(sys.modules), 'they would not see it'\n"
        "turn_off_telemetry()\n"
        "from mlflow.telemetry.client import get_telemetry_client\n"
        "from mlflow.telemetry.utils import is_telemetry_disabled\n"
        "from wandb.env import error_reporting_enabled\n"
        "print(is_telemetry_disabled(), get_telemetry_client(), error_reporting_enabled())\n"
    )
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["True", "None", "False"]


def records_of(file: Path) -> "list[wandb_internal_pb2.Record]":
    """Every record of an offline run. wandb has no reader for Python: the file is a log in the format of LevelDB."""
    content, place = file.read_bytes(), HEADER
    records: list[wandb_internal_pb2.Record] = []
    data = b""
    while place < len(content):
        left_in_block = BLOCK - place % BLOCK
        if left_in_block < CHUNK_HEADER:
            place += left_in_block
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        data += content[place + CHUNK_HEADER : place + CHUNK_HEADER + length]
        place += CHUNK_HEADER + length
        if kind in (WHOLE, LAST):
            records.append(wandb_internal_pb2.Record.FromString(data))
            data = b""
    return records


def points_of(records: "list[wandb_internal_pb2.Record]", name: str) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {
                one.key or "/".join(one.nested_key): float(one.value_json)
                for one in record.history.item
            }
            if name in items:
                found.append((int(items["_step"]), items[name]))
    return found
