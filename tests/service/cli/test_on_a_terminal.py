"""Commands on a terminal show tables that fit, a job that moves, a text that cannot move the cursor."""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from tests.support.service.in_process import Service, split
from tests.support.terminals import TerminalOf


class Terminal(TerminalOf):
    """A command of `tuneship` on a terminal of 80 columns."""

    def __init__(
        self, environment: dict[str, str], *words: str, output: IO[bytes] | None = None
    ) -> None:
        """`output`: where its standard output goes instead, as in `tuneship ... > file`."""
        command = [sys.executable, "-m", "tuneship.cli.main", *words]
        super().__init__(command, {**os.environ, **environment}, output=output)


@pytest.fixture
def served(start: Callable[..., Service]) -> Service:
    service = start()
    service.listen()
    return service


@pytest.fixture
def environment(served: Service, tmp_path: Path) -> dict[str, str]:
    return {
        "TUNESHIP_URL": served.url,
        "TUNESHIP_API_KEY": served.headers["alice"]["Authorization"].removeprefix("Bearer "),
        "TUNESHIP_CLIENT_ID": "alice",
        "XDG_CONFIG_HOME": str(tmp_path),
    }


def test_the_answer_of_an_upload_goes_where_its_output_goes_and_the_bar_to_the_terminal(
    environment: dict[str, str], tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "a", "response": "b"}\n' * 50)
    words = ("upload", str(rows), "--name", "n" * 100, "--format", "instruction", "--json")
    with (tmp_path / "answer").open("wb") as output:
        terminal = Terminal(environment, "datasets", *words, output=output)
        assert terminal.end() == 0
    answer = json.loads((tmp_path / "answer").read_bytes())
    assert (answer["num_examples"], answer["name"]) == (50, "n" * 100)
    assert "rows.jsonl: the service is checking it" in terminal.text
    assert "1.9/1.9 kB" in terminal.text
    assert answer["id"] not in terminal.text


def test_a_download_shows_how_much_has_come(
    served: Service, environment: dict[str, str], tmp_path: Path
) -> None:
    terminal = Terminal(environment, "models", "download", served.model(), str(tmp_path / "out"))
    served.until(lambda: terminal.process.poll() is not None)
    assert terminal.end() == 0, terminal.text
    assert re.search(r"━ (\S+)/\1 kB", terminal.text), terminal.text
    assert [line for line in terminal.screen if "kB" in line] == [], "the bar is removed"
    assert f"3 files in {tmp_path / 'out'}" in terminal.screen


def test_a_table_fits_and_names_what_it_leaves_out(
    served: Service, environment: dict[str, str]
) -> None:
    made = served.dataset(name="x" * 120, tags='{"k": "v"}')
    terminal = Terminal(environment, "datasets", "list")
    assert terminal.end() == 0
    lines = terminal.text.splitlines()
    assert lines[0].split()[:2] == ["id", "name"]
    assert made in lines[1]
    assert max(map(len, lines[:2])) <= 80
    assert "not shown: " in lines[2]
    assert "created_at" in lines[2]
    for verb in ("list", "status"):
        empty = Terminal(environment, "canary", verb)
        assert (empty.end(), empty.text) == (0, "none\n")


def test_the_status_of_a_canary_says_when_its_lease_ends(
    served: Service, environment: dict[str, str]
) -> None:
    members = {served.deployment("old"): 90, served.deployment("new"): 10}
    fallback = split(members)["deployments"]
    canary = served.canary("lent", members, lease={"seconds": 600, "fallback": fallback})
    terminal = Terminal(environment, "canary", "status")
    assert terminal.end() == 0
    lines = terminal.text.splitlines()
    assert re.fullmatch(rf"{canary}  lent  active  lease ends in [56]\d\d s", lines[0])
    assert [line.split()[0] for line in lines[1:]] == ["share", "90", "10"]


def test_a_page_says_how_to_go_on(served: Service, environment: dict[str, str]) -> None:
    for _ in range(2):
        served.dataset()
    terminal = Terminal(environment, "datasets", "list", "--limit", "1")
    assert terminal.end() == 0
    assert "1 of 2: --offset 1 continues, --all fetches every one" in terminal.text


def test_a_watched_job_moves_and_ends(served: Service, environment: dict[str, str]) -> None:
    job = served.job()
    trainer = served.trainer_of(job)
    trainer.start_of(4)
    terminal = Terminal(environment, "jobs", "watch", job)
    trainer.step(1, loss=2.5)
    served.until(lambda: "1 of 4" in terminal.text and "  loss 2.5000" in terminal.text)
    trainer.step(2, loss=1.5)
    served.until(lambda: "2 of 4" in terminal.text and "█▁  loss 1.5000" in terminal.text)
    trainer.complete()
    assert terminal.end() == 0, terminal.text
    assert f"{job} is completed" in terminal.text.splitlines()[-1]


def test_a_text_cannot_command_the_terminal(served: Service, environment: dict[str, str]) -> None:
    body = {"url": "https://93.184.215.14/hook", "events": ["*"], "description": "\x9b2Jred"}
    webhook = served.call("POST", "/v1/webhooks", json=body).json()["id"]
    for form in ((), ("--json",)):
        terminal = Terminal(environment, "webhooks", "get", webhook, *form)
        assert terminal.end() == 0
        assert "\x9b" not in terminal.shown
        assert r"\u009b2Jred" in terminal.text


def test_a_chat_goes_on_until_the_end_of_the_input(
    served: Service, environment: dict[str, str]
) -> None:
    deployment = served.deployment("talks")
    terminal = Terminal(environment, "chat", deployment, "--system", "Be brief.")
    served.until(lambda: terminal.text.endswith("> "))
    terminal.type("first\n")
    served.until(lambda: terminal.text.count("> ") == 2)
    terminal.type("\x04")
    assert terminal.end() == 0, terminal.text
    assert "Diseases of the skin" in terminal.text
    assert "tokens, stop)" in terminal.text
