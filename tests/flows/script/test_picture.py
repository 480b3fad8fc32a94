"""The picture of a release, from the lines that real releases of the demo have recorded."""

import io
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from flows.script.console import open_screen
from flows.script.lines import Lines
from flows.script.picture import ReleasePicture, sentence_of, split_bar
from flows.script.picture_state import STAGES
from flows.shared.release_lines import sendable
from tests.support.terminals import screen_of
from tuneship.prefect.progress import TaskProgress

RECORDED = Path(__file__).parent / "recorded"
URL = "http://127.0.0.1:8700/console/releases/rel_9duwge3pacsihge5s6ijdj6i"
PLANTED = "PLANTED of a person"


class Shown:
    """A picture, and the terminal on which it is drawn."""

    def __init__(self, width: int, **console: Any) -> None:
        self.file = io.StringIO()
        lines = Lines()
        lines.console = Console(
            file=self.file,
            width=width,
            height=50,
            force_terminal=True,
            soft_wrap=True,
            highlight=False,
            **console,
        )
        self.picture = ReleasePicture(lines, STAGES)

    def play(self, name: str, until: Callable[[dict[str, Any]], bool] = lambda _: False) -> None:
        """Play the lines of a release up to the first one that is looked for."""
        for line in (RECORDED / f"{name}.jsonl").read_text().splitlines():
            read = json.loads(line)
            self.picture.line(read["fact"], read["release"])
            if until(read["fact"]):
                break

    @property
    def drawn(self) -> list[str]:
        """The picture as it is now."""
        console = Console(file=io.StringIO(), width=self.picture._live.console.width)
        console.print(self.picture)
        assert isinstance(console.file, io.StringIO)
        return [line.rstrip() for line in console.file.getvalue().splitlines()]

    @property
    def text(self) -> str:
        return "\n".join(self.drawn)

    @property
    def screen(self) -> list[str]:
        return screen_of(self.file.getvalue())


@pytest.fixture
def shown() -> Iterator[Callable[..., Shown]]:
    """Makes pictures, and ends them."""
    made: list[Shown] = []

    def make(width: int = 80, **console: Any) -> Shown:
        made.append(Shown(width, **console))
        return made[-1]

    yield make
    for one in made:
        one.picture.close(None)


def test_it_says_what_it_waits_for(shown: Callable[..., Shown]) -> None:
    one = shown()
    one.picture.wait("starting a Prefect server for this run")
    assert "now        starting a Prefect server for this run: 0 s" in one.drawn
    one.picture.show(TaskProgress("upload", 10_300_000, 51_000_000, is_bytes=True))
    assert "starting a Prefect server" not in one.text
    assert "10.3/51.0 MB" in one.text
    assert "✓ validate ● upload ○ combine ○ tune" in one.text


def test_a_training_has_a_bar_and_its_loss(shown: Callable[..., Shown]) -> None:
    one = shown()
    one.play("promoted", lambda fact: fact["kind"] == "job")
    assert "now        waiting for the job to start" in one.drawn
    for step in range(1, 41):
        losses = {"training": 4.0 / step, "validation": 1.5}
        one.picture.show(TaskProgress("training", step, 100, "epoch 1/2", losses))
    assert "● tune" in one.text
    assert "40 of 100" in one.text
    (loss,) = [line for line in one.drawn if line.startswith("loss")]
    assert loss.split()[1][0] == "█"
    assert loss.endswith("▁  training 0.100  validation 1.500")
    assert "data       800 examples, 400 for validation" in one.drawn
    one.picture.show(TaskProgress("training", 41, 100, "", {"training": float("nan")}))
    assert "training 0.100" in one.text


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_part_fits_the_terminal(shown: Callable[..., Shown], width: int) -> None:
    one = shown(width)
    one.picture.show(TaskProgress("training", 1, 100, "", {"training": 1.5, "validation": 1.5}))
    one.play("promoted", lambda fact: fact.get("verdict") == "promote")
    one.picture.page(URL)
    one.picture.say("a line above")
    assert max(map(len, one.screen)) <= width
    assert max(map(len, one.drawn)) <= width
    assert len(one.drawn) <= 24
    assert URL in one.text.replace("\n           ", "")
    for name in STAGES:
        assert any(f"{mark} {name}" in one.text for mark in "✓●○")


def test_a_rollout_shows_its_split_and_each_gate(shown: Callable[..., Shown]) -> None:
    one = shown()
    one.play("promoted", lambda fact: fact.get("number") == 20)
    assert "✓ evaluate ● shift ○ promote" in one.text
    assert f"traffic    {'░' * 24}{'█' * 8}  baseline 75 %  candidate 25 %" in one.drawn
    assert "checks     ✓ 13 pass" in one.drawn
    assert "gates      error     ━━╌╌╌╌╌╌ open    empty     ━━╌╌╌╌╌╌ open" in one.drawn
    one.play("promoted", lambda fact: fact.get("number") == 40)
    assert "✓ shift ● promote" in one.text
    assert "the bake (the soak at a high share) continues" in " ".join(one.text.split())
    one.play("promoted")
    assert one.text.count("━━━━━━━━ proven") == 4
    assert one.text.count("✓") == len(STAGES) + 1
    assert "baseline 0 %  candidate 100 %" in one.text


def test_a_rollback_shows_the_gate_that_was_harmed(shown: Callable[..., Shown]) -> None:
    one = shown()
    one.play("rolled_back")
    assert "- validate - upload - combine - tune ✓ deploy ✓ evaluate ✗ shift ○ promote" in one.text
    assert "error     ━━━━━━━━ harm" in one.text
    assert "baseline 100 %  candidate 0 %" in one.text


def test_a_refusal_shows_the_gate_that_refuses(shown: Callable[..., Shown]) -> None:
    one = shown()
    one.play("rejected")
    assert "✓ combine ✗ tune ○ deploy" in one.text
    assert "✗ T4 champion: reject" in one.text


def test_a_person_who_is_asked_is_shown_until_the_answer(shown: Callable[..., Shown]) -> None:
    one = shown()
    one.play("promoted", lambda fact: fact["kind"] == "training_gates")
    until = "2026-12-01T10:00:00+00:00"
    one.picture.line({"kind": "question", "question": "q", "asks": ["T4"], "until": until}, True)
    assert "now        waiting for a person until " in one.text
    one.picture.line({"kind": "held_gates", "question": "q", "decision": "promote"}, True)
    assert "a person is asked" not in one.text


def test_no_text_of_a_person_is_shown(shown: Callable[..., Shown], tmp_path: Path) -> None:
    """The picture gets only the fields that may leave this machine, whatever a record holds."""
    one = shown(120)
    own, rollout = tmp_path / "releases" / "r.jsonl", tmp_path / "service" / "rollout-1.jsonl"
    for line in (RECORDED / "promoted.jsonl").read_text().splitlines():
        read = json.loads(line)
        fact = read["fact"] | {"model_name": PLANTED, "comment": PLANTED, "note": PLANTED}
        if read["release"] and "gates" in fact:
            fact["gates"] = [gate | {"note": PLANTED} for gate in fact["gates"]]
        path = own if read["release"] else rollout
        one.picture.line(sendable(path, json.dumps(fact).encode()), read["release"])
        assert PLANTED not in one.text


def test_colours_say_nothing_that_words_do_not(shown: Callable[..., Shown]) -> None:
    plain, coloured = shown(no_color=True), shown(color_system="truecolor")
    for one in (plain, coloured):
        one.play("rolled_back")
        one.picture.close(None)
    assert plain.screen[1:] == coloured.screen[1:]
    assert "\x1b[3" not in plain.file.getvalue(), "a colour"


def test_warnings_stay_above_the_picture_and_the_end_below(shown: Callable[..., Shown]) -> None:
    one = shown()
    one.picture.log("rollout r begins", logging.INFO)
    one.picture.log("the lease was not renewed", logging.WARNING)
    one.play("rolled_back")
    one.picture.page(URL)
    one.picture.close({"outcome": "rolled_back", "reason": "error_rate", "report": "/r/report.md"})
    text = "\n".join(one.screen)
    assert "rollout r begins" not in text
    assert text.index("the lease was not renewed") < text.index("✗ shift")
    assert text.count("✗ shift") == 1
    *_, end, report, page, _ = one.screen
    assert end.endswith(
        "rolled back: the traffic went back to the model that served before"
        " (the candidate fails more requests than the plan allows)."
    )
    assert report.endswith("report: /r/report.md")
    assert page.endswith(f"page: {URL}")


def test_after_a_signal_everything_is_printed_as_without_a_picture(
    shown: Callable[..., Shown],
) -> None:
    one = shown()
    one.play("promoted", lambda fact: fact.get("number") == 20)
    one.picture.stopping()
    one.picture.log("split: candidate 0 %, baseline 100 %", logging.INFO)
    one.picture.close(None)
    one.picture.say("stopped", "bold red")
    *_, last_but_one, last, _ = one.screen
    assert last_but_one.endswith("s split: candidate 0 %, baseline 100 %")
    assert last.endswith("s stopped")
    assert "\n".join(one.screen).count("● shift") == 1


def test_a_run_that_never_began_leaves_no_picture(shown: Callable[..., Shown]) -> None:
    one = shown()
    one.picture.wait("starting a service for this run")
    one.picture.close(None)
    assert "".join(one.screen) == ""


def test_a_page_of_a_service_that_ends_with_the_run_is_no_link(
    shown: Callable[..., Shown],
) -> None:
    one = shown()
    one.play("promoted")
    one.picture.page(URL)
    one.picture.serves_until_the_end()
    one.picture.close({"outcome": "promoted", "reason": "none"})
    assert "http:" not in one.screen[-2]
    assert f"console/releases/{URL.rpartition('/')[2]}" in one.screen[-2]


def test_the_split_never_hides_a_small_share() -> None:
    assert split_bar(1, 80).plain == f"{'░' * 31}█  baseline 99 %  candidate 1 %"
    assert split_bar(0, 80).plain.startswith("░" * 32)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ({"outcome": "promoted", "reason": "none"}, "promoted: the new model serves all traffic."),
        (
            {"outcome": "rejected", "reason": "training_gate", "gate": "T4 champion"},
            "rejected: the new model got no traffic (refused by gate T4 champion).",
        ),
        (
            {"outcome": "skipped", "reason": "no_new_data", "message": "no part is new"},
            "skipped: no part is new.",
        ),
        ({"outcome": "nothing_to_do", "reason": "none"}, "nothing to do."),
    ],
)
def test_how_it_ended_is_one_sentence(result: dict[str, Any], sentence: str) -> None:
    assert sentence_of(result) == sentence


@pytest.mark.parametrize("level", [logging.INFO, logging.WARNING])
def test_a_name_moves_no_cursor(shown: Callable[..., Shown], level: int) -> None:
    one = shown()
    # Only after a signal the picture prints every line.
    one.picture.stopping()
    one.picture.log("a\x1b[2J\u202eb.jsonl: 80 examples\n  line 1: empty", level)
    [head] = [line for line in one.screen if "jsonl" in line]
    assert head.endswith("s a\\u001b[2J\\u202eb.jsonl: 80 examples")
    assert one.screen[one.screen.index(head) + 1] == "  line 1: empty"


def test_a_pipe_gets_lines() -> None:
    """Pytest's own standard error is none."""
    assert isinstance(open_screen(STAGES, is_plain=False), Lines)
