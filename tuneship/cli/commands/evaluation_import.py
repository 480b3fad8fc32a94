"""`tuneship evaluations import`: an eval of OpenAI's, with its rows, as a dataset and an evaluation of this service."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Annotated, Any, cast

import typer
from pydantic import ValidationError

from tuneship.cli.common import fail
from tuneship.cli.connection import connected, reported
from tuneship.cli.declared import verbs_of
from tuneship.cli.operations import show_reply
from tuneship.cli.output import note, show_json
from tuneship.cli.parameters import AsJson
from tuneship.contract.datasets import DatasetUpload
from tuneship.contract.errors import ApiError
from tuneship.contract.evaluations import EvaluationCreate
from tuneship.contract.lines.dataset_lines import LINE_LIMIT_BYTES, decode_line, parse_example
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.reading_lines import BYTE_ORDER_MARK, lines_up_to, numbered
from tuneship.contract.openai.eval_runs import InputMessages, SamplingParams
from tuneship.contract.openai.eval_templates import line_of
from tuneship.contract.openai.evals import EvalCreate, graders_of

# Stands in the checked evaluation for the dataset that is not uploaded yet.
NOT_YET = "ds_" + "0" * 24

app = typer.Typer(no_args_is_help=True)
Row = tuple[str, Mapping[str, Any]]


@app.callback()
def evaluations() -> None:
    """Hold the command that takes over what was defined elsewhere."""


@app.command("import")
def import_(  # noqa: PLR0913 - each is an option
    file: Annotated[Path, typer.Argument(help="The eval as JSON, as OpenAI's API returns it.")],
    rows: Annotated[
        Path | None,
        typer.Argument(
            help="Its rows as JSON Lines, an object with `item` a line; by default those in the run."
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(help="A run of it as JSON, whose prompt is taken.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The prompt instead, such as '{{item.question}}'.")
    ] = None,
    candidate: Annotated[
        str | None, typer.Option(help="The deployment to evaluate; without one nothing is asked.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="One to compare it with.")] = None,
    as_json: AsJson = False,
) -> None:
    """Take over an eval of OpenAI's: upload its rows as a dataset, and create the evaluation.

    Without `--candidate` the evaluation is printed, as a file for `tuneship evaluations create --params`. What this
    service does not offer is refused by its name, and then nothing is uploaded.
    """
    wanted, ran = _eval_in(file), None if run is None else _json_in(run)
    messages, sampling = _messages(prompt, run, ran), _sampling(run, ran)
    fits = _form_of_rows(file, wanted)
    given = _rows_in(rows) if rows is not None else _rows_of_run(run, ran)
    with TemporaryFile() as made:
        count = _write_lines(made, given, messages, wanted, fits)
        made.seek(0)
        name = _name_of(wanted, file)
        graders = graders_of(wanted.testing_criteria)
        body: dict[str, Any] = {
            "name": name,
            "graders": graders,
            "gating": [one["name"] for one in graders][:4],
            "max_examples": count,
            **sampling,
        }
        with reported(), connected() as client:
            evaluation: EvaluationCreate | None = None
            # What the service would refuse behind the upload is found out before it.
            if candidate is not None:
                asked = {"candidate": candidate, "baseline": baseline, "dataset_id": NOT_YET}
                evaluation = _checked("the evaluation", EvaluationCreate, body | asked)
                client.deployments.get(candidate)
                if baseline is not None and baseline.startswith("dep_"):
                    client.deployments.get(baseline)
                elif baseline is not None:
                    client.evaluations.get(baseline)
            form = DatasetUpload(name=name, format="conversation")
            dataset = client.datasets.upload(form, cast("Any", made))
            note(f"{dataset.id} holds the rows ({count})")
            if evaluation is None:
                show_json(body | {"dataset_id": dataset.id})
                return
            try:
                reply = client.evaluations.create(
                    evaluation.model_copy(update={"dataset_id": dataset.id})
                )
            except ApiError:
                # Such as a deployment whose answers may not be as long.
                client.datasets.delete(dataset.id)
                raise
            show_reply(verbs_of("evaluations")["create"], reply, as_json)


def _json_in(path: Path) -> Mapping[str, Any]:
    try:
        return decode_line(path.read_bytes().removeprefix(BYTE_ORDER_MARK))
    except OSError as error:
        fail(f"{path}: cannot be read ({error.strerror})")
    except ExampleProblem as problem:
        fail(f"{path}: {problem.message}")


def _checked(path: Path | str, model: Any, content: Mapping[str, Any]) -> Any:
    from tuneship.cli.parameter_files import problems_of  # noqa: PLC0415 - starts slowly

    try:
        return model.model_validate(content)
    except ValidationError as error:
        fail(f"{path}: {'; '.join(problems_of(error, content, model))}")


def _eval_in(path: Path) -> EvalCreate:
    """The eval of a file; fields that OpenAI's answers have beside those of its requests are left out."""
    shown = _json_in(path)
    config: Any = shown.get("data_source_config")
    if isinstance(config, dict) and "schema" in config:
        whole = cast("dict[str, Any]", config)
        parts: Any = (
            whole["schema"].get("properties") if isinstance(whole["schema"], dict) else None
        )
        item: Any = parts.get("item") if isinstance(parts, dict) else None
        config = {"type": whole.get("type"), "item_schema": item or {}}
    criteria: Any = shown.get("testing_criteria")
    if isinstance(criteria, list):
        listed = cast("list[Any]", criteria)
        criteria = [
            {name: value for name, value in one.items() if name != "id"}
            if isinstance(one, dict)
            else one
            for one in listed
        ]
    content = {
        "data_source_config": config,
        "testing_criteria": criteria,
        "name": shown.get("name") or None,
    }
    return _checked(path, EvalCreate, content)


def _messages(
    prompt: str | None, path: Path | None, run: Mapping[str, Any] | None
) -> Sequence[Mapping[str, str]] | str:
    """The turns of the prompt, or the name of the field that has them."""
    if (prompt is None) == (run is None):
        fail("the prompt: needs either --run or --prompt")
    if prompt is not None:
        turn = {"role": "user", "content": prompt}
        return _checked("--prompt", InputMessages, {"type": "template", "template": [turn]}).turns
    source: Any = (run or {}).get("data_source")
    messages: Any = source.get("input_messages") if isinstance(source, dict) else None
    if not isinstance(messages, dict):
        fail(f"{path}: data_source.input_messages: is needed")
    return _checked(f"{path}: data_source.input_messages", InputMessages, messages).turns


def _sampling(path: Path | None, run: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The settings of an evaluation that do as a run's `sampling_params`, whose answers must be greedy."""
    source: Any = (run or {}).get("data_source")
    given: Any = source.get("sampling_params") if isinstance(source, dict) else None
    if given is None:
        return {}
    place = f"{path}: data_source.sampling_params"
    if not isinstance(given, dict):
        fail(f"{place}: must be an object")
    known = cast("dict[str, Any]", given)
    sent = {name: value for name, value in known.items() if value is not None}
    sampling: SamplingParams = _checked(place, SamplingParams, sent)
    if sampling.temperature:
        fail(f"{place}.temperature: must be 0, as the answers of an evaluation are greedy")
    most = sampling.max_completion_tokens
    return {} if most is None else {"max_tokens": most}


def _form_of_rows(path: Path, wanted: EvalCreate) -> Callable[[Mapping[str, Any]], None]:
    """The check of a row by the eval's schema, which raises `ExampleProblem`."""
    try:
        from tuneship.evaluation.json_values import (  # noqa: PLC0415 - starts slowly
            SchemaUnusable,
            TimedSchema,
            check_row,
        )
    except ModuleNotFoundError:
        # `tuneship-client` holds no graders.
        note("rows are not compared with item_schema: that needs the package tuneship")
        return lambda _: None
    try:
        schema = TimedSchema(wanted.data_source_config.item_schema)
    except SchemaUnusable as error:
        fail(f"{path}: data_source_config.item_schema: {error}")
    return partial(check_row, schema)


def _rows_in(path: Path) -> Iterator[Row]:
    """The place and the item of each line; output items of a run have theirs as `datasource_item`."""
    try:
        with path.open("rb") as lines:
            for number, line in numbered(lines_up_to(lines, LINE_LIMIT_BYTES)):
                yield _row(f"{path}: line {number}", line)
    except OSError as error:
        fail(f"{path}: cannot be read ({error.strerror})")


def _rows_of_run(path: Path | None, run: Mapping[str, Any] | None) -> Iterator[Row]:
    source: Any = (run or {}).get("data_source")
    rows: Any = source.get("source") if isinstance(source, dict) else None
    content: Any = rows.get("content") if isinstance(rows, dict) else None
    if not isinstance(content, list) or not content:
        fail("the rows: need a file of JSON Lines, as the run has none")
    for number, one in enumerate(cast("list[Any]", content)):
        yield _row(f"{path}: data_source.source.content[{number}]", one)


def _row(place: str, given: Any) -> Row:
    try:
        fields = decode_line(given) if isinstance(given, bytes) else given
    except ExampleProblem as problem:
        fail(f"{place}: {problem.message}")
    known = cast("dict[str, Any]", fields) if isinstance(fields, dict) else {}
    item = known.get("item", known.get("datasource_item"))
    if not isinstance(item, dict):
        fail(f"{place}: item: must be an object")
    return place, cast("dict[str, Any]", item)


def _write_lines(
    file: IO[bytes],
    rows: Iterator[Row],
    messages: Sequence[Mapping[str, str]] | str,
    wanted: EvalCreate,
    fits: Callable[[Mapping[str, Any]], None],
) -> int:
    """Write the lines of the dataset and return their number; the first bad row ends the command."""
    criteria = [one.templates for one in wanted.testing_criteria]
    count = 0
    for place, item in rows:
        count += 1
        try:
            fits(item)
            line = line_of(item, messages, criteria)
            parse_example(line, "conversation")
        except ExampleProblem as problem:
            fail(f"{place}: {problem.field or 'it'} {problem.message}")
        file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
    if not count:
        fail("the rows: there are none")
    return count


def _name_of(wanted: EvalCreate, path: Path) -> str:
    letters = "".join(
        one if one.isascii() and (one.isalnum() or one in " ._-") else "_"
        for one in wanted.name or path.stem
    )
    return letters.lstrip(" ._-")[:128] or "imported eval"
