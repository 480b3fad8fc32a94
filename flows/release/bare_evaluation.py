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
from tuneship.contract.lines.dataset_lines import LINE_LIMIT_BYTES, ExampleProblem
from tuneship.contract.lines.reading_lines import lines_up_to, numbered
from tuneship.evaluation.graders import AnswerToScore
from tuneship.evaluation.items import EvaluationItem, MetadataRefused, read_item
from tuneship.evaluation.scoring import (
    Answers,
    HeldOutExample,
    NoAnswer,
    Scoring,
    Stored,
    held_out_examples,
)
from tuneship.evaluation.selection import select
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
    refuse_likelihoods(wanted)
    examples = read_examples(Path(file), wanted, MOST_EXAMPLES, of_one_question=True)
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


def refuse_likelihoods(wanted: ReleaseEvaluation) -> None:
    """Raise `BadInput` for a grader that needs log probabilities of tokens as training makes them."""
    for number, grader in enumerate(wanted.graders):
        if grader.type in ("choice", "loss"):
            text = "which the service does not offer, since the pipeline knows no tokens"
            raise BadInput(
                f"evaluation.graders[{number}].type: {grader.type} needs evaluations, {text}"
            )


def read_examples(
    file: Path, wanted: ReleaseEvaluation, most: int, *, of_one_question: bool = False
) -> Sequence[HeldOutExample]:
    """The selected examples, `most` of them. Raises `BadInput` for metadata that do not fit."""
    dataset_format = format_of_file(file)
    read: list[tuple[int, EvaluationItem]] = []
    with file.open("rb") as stream:
        for number, line in numbered(lines_up_to(stream, LINE_LIMIT_BYTES)):
            try:
                item = read_item(line, dataset_format)
            except ExampleProblem:
                continue  # the service's verdict on the file counts, and it came first
            is_simple = [turn["role"] for turn in item.prompt] == ["user"] and not item.calls
            if is_simple or not of_one_question:
                read.append((number, item))
    chosen = [read[n] for n in select(len(read), min(wanted.max_examples, most), wanted.seed)]
    try:
        return held_out_examples(chosen, wanted)
    except MetadataRefused as error:
        line = "" if error.example is None else f" ({file.name}, line {chosen[error.example][0]})"
        raise BadInput(f"evaluation.{error.field} {error.message}{line}") from None


def _given(answer: SmokeAnswer) -> Answers:
    if answer.status == 200:
        return {None: AnswerToScore(answer.completion)}
    return {None: NoAnswer("no_answer", answer.status)}
