"""The process that reads a foreign model has no network, and no files but those of the model and its own folder."""

import json
import socket
from pathlib import Path

import pytest

from tests.support.service.processes import ROOT
from tuneship.conversion.order import ReadingOrder
from tuneship.service.catalogues.adding import read_in_process

# Tries what a file that takes over its reader would try, and reports what became of each.
INTRUDER = """
import json, pathlib, socket, sys

def outcome(attempt):
    try:
        attempt()
    except OSError as error:
        return type(error).__name__
    return "done"

order = json.loads(pathlib.Path(sys.argv[1]).read_text())
attempts = {
    "call": lambda: socket.create_connection(("127.0.0.1", %d), 5),
    "local call": lambda: socket.socket(socket.AF_UNIX).connect(%r),
    "read": lambda: pathlib.Path(%r).read_text(),
    "change": lambda: pathlib.Path(order["source"], "config.json").write_text("{}"),
    "report": lambda: pathlib.Path(sys.argv[2]).write_text("{}"),
}
outcomes = {name: outcome(attempt) for name, attempt in attempts.items()}
pathlib.Path(sys.argv[2]).write_text(json.dumps({"fault": json.dumps(outcomes)}))
"""


def test_the_process_that_reads_a_model_has_no_network_and_no_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, source, work = (tmp_path / name for name in ("code", "source", "work"))
    for folder in (code, source, work):
        folder.mkdir()
    (source / "config.json").write_text("{}")
    secret, local = tmp_path / "secret", tmp_path / "socket"
    secret.write_text("secret")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{code}")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as other:
        other.bind(str(local))
        other.listen()
        port = server.getsockname()[1]
        (code / "reader_of_test.py").write_text(INTRUDER % (port, str(local), str(secret)))
        order = ReadingOrder(str(source), str(work))
        report = read_in_process(order, work, source, "reader_of_test")
    assert report.fault is not None
    outcomes = json.loads(report.fault)
    assert outcomes.pop("report") == "done"
    assert set(outcomes.values()) == {"PermissionError"}
