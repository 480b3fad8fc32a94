"""Reports, pages and questions show a text that somebody chose, and it has no effect there."""

from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from pydantic import ValidationError

from flows.forms.release_form import ReleaseParameters
from flows.release import gate_approval
from flows.release.reports.report import report, with_pictures
from flows.release.result import Contender, ReleaseResult
from flows.rollout import promotion_approval
from flows.rollout.page import page
from flows.shared.approval import Approval
from tests.flows.conftest import plan
from tests.support.payloads import BREAKS, SCRIPTS
from tuneship.cards.markdown import number, plain
from tuneship.gates.gate_result import GateResult
from tuneship.gates.plan import CanaryPlan
from tuneship.gates.record import Begun, RolloutRecord
from tuneship.gates.reports.split_history import Change

OWN_TAGS = {
    "h1",
    "h2",
    "p",
    "ul",
    "li",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "code",
    "strong",
}
# The most permissive renderer possible, which leaves tags unchanged.
RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


class Shown(HTMLParser):
    """Collects the tags of a page, the addresses that it names, and its text."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text = set[str](), list[tuple[str, str | None]](), ""
        self.feed(RENDERER.render(markdown))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.tags.add("a comment")


def release_of(text: str) -> ReleaseParameters:
    """A release with this text in its tags, without control characters, which a tag may not hold."""
    text = "".join(sign for sign in text if sign >= " ")
    return ReleaseParameters.model_validate(
        {
            "model_name": "chapters",
            "endpoint": {"name": "shop"},
            "data": {"files": ["a.jsonl"]},
            "deployment": {"tags": {text: text}},
        }
    )


def result_of(text: str) -> ReleaseResult:
    """A result with this text in every field, even in those that only a service can choose."""
    change = {"at": None, "weights": {text: 100}, "why": text}
    gate = {"name": "T4", "state": "reject", "value": 0.5, "limit": 0.3, "note": text}
    return ReleaseResult(
        outcome="rejected",
        reason="training_gate",
        gate="T4",
        run_key=text,
        notes=[text, f"decided by {text}"],
        training_gates=[gate],
        endpoint_id=text,
        job_id=text,
        model=text,
        champion_model=text,
        baseline_deployment_id=text,
        candidate_deployment_id=text,
        history=[Change.model_validate(change)],
        contenders=[
            Contender(
                job_id=text,
                status=text,
                model=text,
                validation_loss=1.0,
                hyperparameters={text: text},
            )
        ],
    )


def plan_of(text: str) -> CanaryPlan:
    ids = {"baseline_deployment_id": text, "candidate_deployment_id": f"{text}2"}
    return plan(**ids, endpoint_id=text)


def record_of(text: str) -> RolloutRecord:
    wanted = plan_of(text)
    return RolloutRecord((Begun("rollout-1", text, wanted.model_dump(mode="json"), "", ()),))


def gate_of(text: str) -> GateResult:
    return GateResult("T8 enough data", "hold", note=text)


PAGES: dict[str, Callable[[str], str]] = {
    "the report of a release": lambda text: report(result_of(text), release_of(text), []),
    "the page of a rollout": lambda text: page(record_of(text), result_of(text)),
    "the question before all traffic": lambda text: promotion_approval.question_text(
        record_of(text), plan_of(text)
    ),
    "the question about gates": lambda text: gate_approval.question_text([gate_of(text)], text),
}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("text", [*SCRIPTS, *(f"a{sign}# b | c" for sign in BREAKS)])
def test_a_text_that_somebody_chose_is_shown_and_not_obeyed(name: str, text: str) -> None:
    harmless, hostile = (Shown(PAGES[name](one)) for one in ("harmless", text))
    assert hostile.tags == harmless.tags <= OWN_TAGS
    assert hostile.attributes == harmless.attributes, "no address of its own"


@pytest.mark.parametrize("text", SCRIPTS)
def test_a_person_reads_exactly_what_was_typed(text: str) -> None:
    shown = Shown(f"| a | b |\n|---|---|\n| {plain(text)} | x |\n")
    assert text.replace("\t", " ") in shown.text


def test_a_text_that_looks_like_a_picture_is_no_file_of_the_report(tmp_path: Path) -> None:
    text = report(result_of("![x](missing.png)"), release_of("![x](missing.png)"), [])
    assert with_pictures(text, tmp_path) == text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(12_345, "12345"), (0, "0"), (1.23456, "1.235"), (0.000123456, "0.0001235"), (None, "-")],
)
def test_a_count_is_shown_whole_and_a_measured_value_in_four_digits(
    value: float | None, shown: str
) -> None:
    assert number(value) == shown


@pytest.mark.parametrize("sign", ["\r\n", "\n", "\r", "\x1b[2J", "\x00"])
def test_a_run_key_and_the_name_of_an_approver_are_one_line(sign: str) -> None:
    forged = f"a{sign}12:00 promoted"
    whole = release_of("a").model_dump(mode="json")
    with pytest.raises(ValidationError, match="run_key"):
        ReleaseParameters.model_validate(whole | {"run_key": forged})
    with pytest.raises(ValidationError, match="approver"):
        Approval(approver=forged)
