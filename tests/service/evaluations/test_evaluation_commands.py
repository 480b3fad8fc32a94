"""`tuneship evaluations watch` and `inspect`: exit codes by the verdict, and the answers behind the scores."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tests.support.service.evaluations import PLANTED, PlayedAnswers, rows
from tests.support.service.in_process import Service, jsonl
from tuneship.cli.main import app


class Terminal:
    """The command line of a user of a service with played answers."""

    def __init__(self, service: Service, folder: Path) -> None:
        self.played = PlayedAnswers(service).set_up()
        self.file = folder / "held-out.jsonl"
        self.file.write_bytes(jsonl(*rows(400)))
        service.listen()
        key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
        self.environment = {
            "TUNESHIP_URL": service.url,
            "TUNESHIP_API_KEY": key,
            "TUNESHIP_CLIENT_ID": "alice",
            "XDG_CONFIG_HOME": str(folder / "config"),
        }

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(app, ["evaluations", *words], env=self.environment)


@pytest.fixture
def terminal(start: Callable[..., Service], tmp_path: Path) -> Terminal:
    return Terminal(start(), tmp_path)


def test_watching_ends_with_a_code_for_each_verdict(terminal: Terminal) -> None:
    played = terminal.played
    passed = terminal.run("watch", played.create(margin=0.08))
    assert passed.exit_code == 0, passed.output
    assert "pass: not worse on 400 examples" in passed.output
    few = terminal.run("watch", played.create(max_examples=50))
    assert few.exit_code == 5, few.output
    as_json = terminal.run("watch", played.create(margin=0.08), "--json")
    assert json.loads(as_json.stdout)["verdict"] == "pass"
    played.tuned_fails = range(400)
    worse = terminal.run("watch", played.create())
    assert worse.exit_code == 3, worse.output
    assert PLANTED not in passed.output + few.output + worse.output
    played.service.engines.may_answer.clear()
    made = played.create()
    played.service.call("POST", f"/v1/evaluations/{made}/cancel")
    played.service.engines.may_answer.set()
    assert terminal.run("watch", made).exit_code == 1


def test_inspecting_asks_again_for_the_lost_lines_of_the_evaluated_file(
    terminal: Terminal,
) -> None:
    played = terminal.played
    played.tuned_fails = {4, 7}
    found = played.ended(played.create(stop_early=False))

    done = terminal.run("inspect", found["id"], str(terminal.file), "--losses")

    assert done.exit_code == 0, done.output
    assert [line for line in done.output.splitlines() if line.startswith("==")] == [
        "== line 5: loss",
        "== line 8: loss",
    ]
    assert f"user: {PLANTED}: case 4?" in done.output
    assert f"reference: {PLANTED}, chapter 0" in done.output
    assert f"candidate: {PLANTED}, no idea" in done.output
    assert f"baseline: {PLANTED}, chapter 0" in done.output
    terminal.file.write_bytes(jsonl(*rows(399)))
    other = terminal.run("inspect", found["id"], str(terminal.file))
    assert other.exit_code == 1
    assert "is not the file that was evaluated" in other.output
