"""The parameters of a command, from its operation's signature; and the operation's arguments, from the command line.

Ids of the path and a file are arguments, the query and the first level of a body are options; `--set` and `--params`
reach every depth of a body.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError

from tuneship.cli.completion import completing, word_completion
from tuneship.cli.declared import DeclaredVerb
from tuneship.cli.fields import (
    BadField,
    FieldKind,
    choices_of,
    described,
    element_of,
    is_header,
    kind_of,
    members,
    pair_in,
    set_field,
    type_words,
    value_of,
    wire_names,
)
from tuneship.contract.declaring.operation import JSON_LINES, Operation

# Headers that a caller may choose, by the client's option.
HEADERS = {
    "If-Match": ("if_match", "Only if the resource still has this version (its ETag)."),
    "X-Routing-Key": ("routing_key", "Requests with the same key go to the same deployment."),
}
WIDEST_CHOICE = 40
GENERAL = "General options"
FIELDS = "Fields of the request"

AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON: one document, or one per line where entries are streamed.",
        rich_help_panel=GENERAL,
    ),
]


def parameter(name: str, kind: Any, info: Any, default: Any = None) -> inspect.Parameter:
    """One parameter of a command, by keyword."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


AS_JSON = inspect.Parameter(
    "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson
)


def path_argument(name: str, hint: Any) -> inspect.Parameter:
    """An id of the path; the shell completes it from the list of its resource."""
    info = typer.Argument(metavar=name.upper(), show_default=False, autocompletion=completing(hint))
    return parameter(name, str, info, inspect.Parameter.empty)


def field_options(
    model: type[BaseModel], panel: str, leave_out: Iterable[str] = ()
) -> list[inspect.Parameter]:
    """An option for each field of a model that fits into one."""
    found: list[inspect.Parameter] = []
    for name, (field, hint) in wire_names(model).items():
        kind, flag = kind_of(hint), f"--{name.replace('_', '-')}"
        if name in leave_out or kind is FieldKind.DEEP:
            continue
        info: dict[str, Any] = {
            "help": described(field, hint), "show_default": False, "rich_help_panel": panel,
        }  # fmt: skip
        if kind is FieldKind.FLAG:
            option = typer.Option(f"{flag}/--no-{flag[2:]}", **info)
            found.append(parameter(name, bool | None, option))
            continue
        many = kind is not FieldKind.TEXT
        words = choices_of(element_of(hint) if kind is FieldKind.LIST else hint)
        joined = "|".join(words)
        if kind is FieldKind.PAIRS:
            info["metavar"] = "KEY=VALUE"
        elif words and len(joined) <= WIDEST_CHOICE:
            info["metavar"] = joined
        elif not words:
            info["metavar"] = f"<{type_words(element_of(hint) if many else hint)}>"
        else:
            info["help"] = f"{info['help']} One of {', '.join(words)}.".strip()
        info["autocompletion"] = (
            word_completion(words) if words else completing(element_of(hint) if many else hint)
        )
        found.append(
            parameter(name, list[str] | None if many else str | None, typer.Option(flag, **info))
        )
    return found


def parameters_of(verb: DeclaredVerb) -> list[inspect.Parameter]:
    """All parameters of a declared command, in the order of its help."""
    operation = verb.operation
    found = [path_argument(name, operation.hints[name]) for name in operation.path_parameters]
    if operation.file_parameter and operation.file_media is JSON_LINES:
        found += _file_parameters(operation.file_parameter)
    elif operation.file_parameter:
        found.append(
            _folder(operation.file_parameter, "A peft directory with its weights as safetensors.")
        )
    if operation.is_download:
        found.append(_folder("target", "A new folder for what is downloaded."))
    # A stream of a log is what `--follow` asks for.
    streams = ("stream",) if verb.can_follow else ()
    found += field_options(operation.query_model, "Options", streams)
    if operation.body_parameter:
        model = operation.body_parameter[1]
        found += field_options(model, FIELDS)
        found += body_options(model)
    if verb.can_follow:
        info = typer.Option(
            "--follow", "-f", help="Continue until the end, over broken connections."
        )
        found.append(parameter("follow", bool, info, False))
    if verb.paged:
        info = typer.Option("--all", help="Fetch every page.", rich_help_panel=GENERAL)
        found.append(parameter("every_page", bool, info, False))
    return [*found, *_request_options(operation), AS_JSON]


def _folder(name: str, text: str) -> inspect.Parameter:
    info = typer.Argument(metavar="FOLDER", show_default=False, help=text)
    return parameter(name, Path, info, inspect.Parameter.empty)


def _file_parameters(name: str) -> list[inspect.Parameter]:
    """The file of an upload, and which of its columns are sent."""
    file = typer.Argument(
        metavar="FILE", show_default=False, help="JSON Lines in UTF-8; or a .csv or .parquet file."
    )
    columns = typer.Option(
        "--columns",
        metavar="FIELD=COLUMN,...",
        help="Which column holds which field; only these are sent: instruction=question,response=answer.",
        show_default=False,
    )
    return [
        parameter(name, Path, file, inspect.Parameter.empty),
        parameter("columns", str | None, columns),
    ]


def body_options(model: type[BaseModel]) -> list[inspect.Parameter]:
    """`--params` and `--set`, which reach every field of a body."""
    deep = "; ".join(
        f"{name}: {', '.join(_inner_names(hint))}" if _inner_names(hint) else name
        for name, (_, hint) in wire_names(model).items()
        if kind_of(hint) is FieldKind.DEEP
    )
    only = f" Fields without an option of their own: {deep}." if deep else ""
    place = {"show_default": False, "rich_help_panel": FIELDS}
    return [
        parameter(
            "set_fields",
            list[str] | None,
            typer.Option("--set", metavar="PATH=VALUE", help=f"Set a field at any depth, as a.b=value.{only}", **place),
        ),
        parameter(
            "params",
            str | None,
            typer.Option(
                "--params",
                metavar="FILE|-",
                help="YAML or JSON file of the whole request; - reads standard input. --set and options win.",
                **place,
            ),
        ),
    ]  # fmt: skip


def _inner_names(hint: Any) -> list[str]:
    """The fields inside of a field that is a model."""
    models = [one for one in members(hint) if isinstance(one, type) and issubclass(one, BaseModel)]
    return [name for model in models for name in wire_names(model)]


def _request_options(operation: Operation[..., Any]) -> list[inspect.Parameter]:
    offered = [HEADERS[name] for name in operation.headers if name in HEADERS]
    if operation.takes_idempotency_key:
        offered.append(
            ("idempotency_key", "A repeated call with the same key has no further effect.")
        )
    return [
        parameter(
            name,
            str | None,
            typer.Option(
                f"--{name.replace('_', '-')}",
                metavar="KEY" if name.endswith("key") else "VERSION",
                help=text,
                show_default=False,
                rich_help_panel=GENERAL,
            ),
        )
        for name, text in offered
    ]


def request_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the client that were given: headers of the request. Raises `BadField`."""
    names = (*(name for name, _ in HEADERS.values()), "idempotency_key")
    found = {name: str(given[name]) for name in names if given.get(name) is not None}
    for name, value in found.items():
        if not is_header(value):
            raise BadField(f"--{name.replace('_', '-')}: must be printable ASCII")
    return found


def given_fields(model: type[BaseModel], given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that were given as options, as JSON values. Raises `BadField`."""
    fields: dict[str, Any] = {}
    for name, (_, hint) in wire_names(model).items():
        value = given.get(name)
        # Typer hands over an empty list for a repeatable option that was not given.
        if value is None or value == [] or value == ():
            continue
        kind = kind_of(hint)
        if kind is FieldKind.TEXT:
            fields[name] = value_of(hint, value)
        elif kind is FieldKind.LIST:
            fields[name] = [value_of(element_of(hint), one) for one in value]
        elif kind is FieldKind.PAIRS:
            pairs = (pair_in(one, f"--{name.replace('_', '-')}") for one in value)
            fields[name] = {key: value_of(element_of(hint), text) for key, text in pairs}
        elif kind is FieldKind.FLAG:
            fields[name] = value
    return fields


def body_of(
    model: type[BaseModel], given: Mapping[str, Any], begun: Mapping[str, Any] | None = None
) -> Any:
    """The body from `--params`, `--set` and options, checked as the service would. Raises `BadField`.

    `begun`: fields that the command sets itself.
    """
    content = dict(begun or {})
    source = given.get("params")
    if source is not None:
        from tuneship.cli.parameter_files import UnreadableParameters, mapping_in  # noqa: PLC0415 - starts slowly

        name = "standard input" if source == "-" else source
        try:
            text = sys.stdin.read() if source == "-" else Path(source).read_text("utf-8")
            content |= mapping_in(text)
        except OSError as error:
            raise BadField(f"--params: {name} cannot be read ({error.strerror})") from None
        except UnicodeDecodeError:
            raise BadField(f"--params: {name} is not valid YAML or JSON") from None
        except UnreadableParameters as fault:
            raise BadField(f"--params: {name}: {fault}") from None
    for assignment in given.get("set_fields") or ():
        set_field(content, model, assignment)
    for name, value in given_fields(model, given).items():
        known = content.get(name)
        if isinstance(value, dict) and isinstance(known, dict):
            content[name] = {**known, **value}
        else:
            content[name] = value
    return _checked(lambda: model.model_validate_json(json.dumps(content)), content, model)


def _checked(
    validate: Callable[[], Any],
    content: Mapping[str, Any],
    model: type[BaseModel] | None = None,
) -> Any:
    from tuneship.cli.parameter_files import problems_of  # noqa: PLC0415 - starts slowly

    try:
        return validate()
    except ValidationError as error:
        raise BadField("; ".join(problems_of(error, content, model))) from None


def arguments_of(operation: Operation[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the operation, except a file. Raises `BadField`, before anything is sent."""
    arguments: dict[str, Any] = {}
    for name in operation.path_parameters:
        # An empty id, or one of dots, would make the path of another operation.
        if given[name].strip(".") == "" or not given[name].isprintable():
            raise BadField(f"{name.upper()}: must be an id")
        arguments[name] = given[name]
    model = operation.query_model
    query = given_fields(model, given)
    checked = _checked(lambda: model.model_validate(query), query)
    arguments |= {name: getattr(checked, name) for name in query}
    if operation.body_parameter:
        name, body = operation.body_parameter
        arguments[name] = body_of(body, given)
    return arguments
