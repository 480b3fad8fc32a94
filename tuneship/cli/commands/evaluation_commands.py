"""`tuneship evaluations watch` and `inspect`: follow an evaluation to its end, and see the answers behind its scores.

No answer is stored, so `inspect` asks both deployments again.
"""

import hashlib
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneship.cli.common import fail
from tuneship.cli.completion import completing
from tuneship.cli.connection import connected, reported
from tuneship.cli.operations import FOLLOWING_TRIES
from tuneship.cli.output import one_line, readable, show_json, write
from tuneship.cli.parameters import AsJson
from tuneship.contract.common import EvaluationId, count
from tuneship.contract.evaluations import OPEN, Evaluation, EvaluationStatus, ExampleScores
from tuneship.contract.generation import Generate
from tuneship.contract.lines.dataset_lines import (
    decode_line,
    parse_example,
    text_of,
)
from tuneship.contract.lines.line_fields import format_of
from tuneship.contract.lines.reading_lines import BYTE_ORDER_MARK

if TYPE_CHECKING:  # starts slowly
    from tuneship.client import Client

POLL_S = 1.0
REJECTED, UNDECIDED = 3, 5
SHOWN = 20

app = typer.Typer(no_args_is_help=True)
Identifier = Annotated[
    str,
    typer.Argument(
        metavar="EVALUATION_ID", autocompletion=completing(EvaluationId), show_default=False
    ),
]


@app.callback()
def evaluations() -> None:
    """Hold the verbs of evaluations that are not made from a declared operation."""


@app.command()
def watch(evaluation_id: Identifier, as_json: AsJson = False) -> None:
    """Watch an evaluation until it has ended: examples, wins and losses, and the verdict.

    Ends with 0 if the candidate passes or nothing is to be decided, with 3 if it is rejected, with 5 if the examples
    cannot decide, and with 1 if the evaluation failed or was cancelled.
    """
    with reported(), connected() as asked:
        found = asked.evaluations.get(evaluation_id)
        client = asked.with_options(tries=FOLLOWING_TRIES)
        with _progress(as_json) as show:
            while found.status in OPEN:
                if not as_json:
                    show(found)
                time.sleep(POLL_S)
                found = client.evaluations.get(evaluation_id)
        if as_json:
            show_json(found.model_dump(mode="json"))
        else:
            write(ending(found))
    if found.status != EvaluationStatus.COMPLETED:
        raise typer.Exit(1)
    code = {"reject": REJECTED, "hold": UNDECIDED}.get(found.verdict or "", 0)
    if code:
        raise typer.Exit(code)


@contextmanager
def _progress(as_json: bool) -> Generator[Any]:
    """Yield a function that shows an evaluation: a bar on a terminal, a line for each change elsewhere."""
    from rich.console import Console, Group  # noqa: PLC0415 - starts slowly
    from rich.text import Text  # noqa: PLC0415

    from tuneship.cli.live import Picture, bars, shows_pictures  # noqa: PLC0415

    console = Console()
    if as_json or not shows_pictures(console):
        seen: list[str] = []

        def line(found: Evaluation) -> None:
            text = f"{found.id} {found.status}: {progress_of(found)}"
            if [text] != seen:
                seen[:] = [text]
                write(text)

        yield line
        return
    bar, head = bars(), Text("")
    task = bar.add_task("", total=None)

    def draw(found: Evaluation) -> None:
        counts = found.examples
        done = counts.scored + counts.leaked + counts.too_long + counts.failed
        head.plain = one_line(f"{found.id}  {found.status}  {progress_of(found)}")
        bar.update(task, completed=done, total=counts.selected or None)

    with Picture(console, lambda: Group(head, bar)):
        yield draw


def progress_of(found: Evaluation) -> str:
    """The counts of an evaluation in one line."""
    first = next(iter(found.graders), None)
    done = f"{found.examples.scored} of {found.examples.selected or '?'} examples"
    if first is None or first.wins is None:
        return done
    return f"{done}, {count(first.wins, 'win')}, {count(first.losses or 0, 'loss', 'losses')}"


def ending(found: Evaluation) -> str:
    """One line about an evaluation that has ended."""
    if found.status != EvaluationStatus.COMPLETED:
        why = "" if found.error is None else f": {one_line(found.error.get('code', ''))}"
        return f"{found.id} is {one_line(found.status)}{why}"
    verdict = found.verdict or "scores only"
    return f"{found.id}: {verdict}: {one_line(found.sentence or progress_of(found))}"


@app.command()
def inspect(
    evaluation_id: Identifier,
    file: Annotated[Path, typer.Argument(help="The evaluated JSON Lines file.")],
    losses: Annotated[
        bool, typer.Option("--losses", help="Only what the baseline alone had right.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, help="Examples at most.")] = SHOWN,
) -> None:
    """Ask both deployments again for evaluated examples, and show prompt, reference and answers on this terminal.

    The service stores no answers. The file must be the one that was evaluated, byte for byte.
    """
    with reported(), connected() as client:
        found = client.evaluations.get(evaluation_id)
        if all(one.type in ("choice", "loss") for one in found.settings.graders):
            fail(f"{evaluation_id}: no answer was written, as its graders score given ones")
        lines = _lines_of(file, found)
        chosen: list[ExampleScores] = []
        for one in client.evaluations.iterate_results(
            evaluation_id, limit=100, outcome="loss" if losses else None
        ):
            if one.candidate is not None:
                chosen.append(one)
            if len(chosen) == limit:
                break
        for one in sorted(chosen, key=lambda scores: scores.line):
            _show(client, found, one, lines[one.line - 1])
        write(count(len(chosen), "example"))


def _lines_of(file: Path, found: Evaluation) -> Sequence[bytes]:
    try:
        content = file.read_bytes()
    except OSError as error:
        fail(f"{file}: cannot be read ({error.strerror})")
    if hashlib.sha256(content).hexdigest() != found.dataset_sha256:
        fail(f"{file}: is not the file that was evaluated (its SHA-256 differs)")
    return content.split(b"\n")


def _show(client: "Client", found: Evaluation, one: ExampleScores, line: bytes) -> None:
    fields = decode_line(line.removeprefix(BYTE_ORDER_MARK))
    *prompt, reference = parse_example(fields, format_of(fields))
    write(f"== line {one.line}: {one.outcome}")
    for message in prompt:
        write(f"{message['role']}: {readable(text_of(message))}")
    write(f"reference: {readable(text_of(reference))}")
    if any("tool_calls" in message or message["role"] == "tool" for message in prompt):
        write("(a conversation with calls is not asked again)")
        return
    messages = [{"role": turn["role"], "content": turn["content"]} for turn in prompt]
    request = Generate.model_validate(
        {"messages": messages, "max_tokens": found.settings.max_tokens, "temperature": 0.0}
    )
    asked = {"candidate": found.candidate, "baseline": found.baseline}
    for name, deployment_id in asked.items():
        if deployment_id is not None and deployment_id.startswith("dep_"):
            answer = client.deployments.generate(deployment_id, request)
            write(f"{name}: {readable(answer.completion)}")
    write("")
