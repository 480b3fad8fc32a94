"""Gate T12 at a server without evaluations: the pipeline asks both deployments, grades, counts and judges itself.

Texts stay in memory. The examples come from a local file; conversations of several turns are left out, because such a
server may take a prompt only.
"""

from collections.abc import Sequence
from pathlib import Path

from flows.forms.release_form import ReleaseEvaluation
from flows.release.local_files import format_of_file
from flows.release.result import LOSSES_SHOWN, EvaluationFindings
from flows.shared.errors import BadInput
from tasks.sample_answers import answer_prompts
from tuneship.contract.evaluations import GraderReport, SliceReport
from tuneship.contract.lines.dataset_lines import ExampleProblem
from tuneship.evaluation.graders import GivenAnswer
from tuneship.evaluation.items import EvaluationItem, numbered, read_item
from tuneship.evaluation.scoring import (
    Answer,
    HeldOutExample,
    NoAnswer,
    Scoring,
    Stored,
    held_out_examples,
)
from tuneship.evaluation.selection import select
from tuneship.evaluation.slices import SliceRefused
from tuneship.gates.evaluation.evaluation_report import report_of
from tuneship.gates.evaluation.evaluation_tally import example_of, rules_of, tally_of
from tuneship.gates.evaluation.verdict import LOOK_EXAMPLES, judge, look, record_of
from tuneship.gates.smoke_test import SmokeAnswer

MOST_EXAMPLES = 200
IN_FLIGHT = 16


def evaluate_here(
    baseline_id: str,
    candidate_id: str,
    wanted: ReleaseEvaluation,
    file: str | None,
) -> tuple[str | None, EvaluationFindings]:
    """The verdict on both deployments' answers, and the findings. Raises `BadInput` and `DeploymentGone`.

    Examples are asked 25 at a time, until the evidence suffices or all are asked.
    """
    if file is None:
        raise BadInput("evaluation.dataset_id: the service offers no evaluations; name a file")
    examples = read_examples(Path(file), wanted)
    rules = rules_of(wanted, has_baseline=True)
    scoring, tally = Scoring(wanted), tally_of(wanted, ())
    found, stored = None, list[Stored]()
    for start in range(0, len(examples), LOOK_EXAMPLES):
        piece = examples[start : start + LOOK_EXAMPLES]
        baseline, candidate = answer_prompts(
            [baseline_id, candidate_id],
            [one.item.prompt[-1]["content"] for one in piece],
            wanted.max_tokens,
            purpose="evaluation",
            in_flight=IN_FLIGHT,
        )
        for example, ours, theirs in zip(piece, candidate, baseline, strict=True):
            stored.append(scoring.score(example, _given(ours), _given(theirs)))
            tally.add(example_of(stored[-1]))
        # The evidence holds at any number of looks, also where an example had no answer.
        if (found := look(tally.counts, rules)) is not None:
            break
    found = found or judge(tally.counts, rules)
    report = report_of(tally, found, has_ended=True)
    return found.verdict, EvaluationFindings(
        evaluation_id=None,
        sentence=report["sentence"] or "",
        graders=[GraderReport.model_validate(one) for one in report["graders"]],
        slices=[SliceReport.model_validate(one) for one in report["slices"]],
        lost_lines=sorted(one["line"] for one in stored if one["outcome"] == "loss")[:LOSSES_SHOWN],
        record=record_of(found),
    )


def read_examples(file: Path, wanted: ReleaseEvaluation) -> Sequence[HeldOutExample]:
    """The selected examples with one question and one answer. Raises `BadInput` for an unknown slice or cluster."""
    dataset_format = format_of_file(file)
    read: list[tuple[int, EvaluationItem]] = []
    with file.open("rb") as stream:
        for number, line in numbered(stream):
            try:
                item = read_item(line, dataset_format)
            except ExampleProblem:
                continue  # the service's verdict on the file counts, and it came first
            if [turn["role"] for turn in item.prompt] == ["user"] and not item.calls:
                read.append((number, item))
    chosen = [
        read[n] for n in select(len(read), min(wanted.max_examples, MOST_EXAMPLES), wanted.seed)
    ]
    try:
        return held_out_examples(chosen, wanted)
    except SliceRefused as error:
        raise BadInput(f"evaluation.{error.field} {error.message}") from None


def _given(answer: SmokeAnswer) -> Answer:
    if answer.status == 200:
        return GivenAnswer(answer.completion)
    return NoAnswer("no_answer", answer.status)
