"""The command line of a call: the examples of the help, made from the contract's own examples."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from tuneship.cli.declared import DeclaredVerb
from tuneship.cli.fields import FieldKind, kind_of, wire_names
from tuneship.contract.declaring.examples import PATH_VALUES
from tuneship.contract.declaring.operation import JSON_LINES

EXAMPLE_FILE, EXAMPLE_FOLDER = "train.jsonl", "my-adapter"


def command_line(
    verb: DeclaredVerb, path_values: Mapping[str, str], body: Mapping[str, Any], file: str
) -> list[str]:
    """The words after `tuneship` that send this body."""
    operation = verb.operation
    words = [
        verb.group,
        verb.name,
        *(path_values.get(name, name.upper()) for name in operation.path_parameters),
    ]
    if operation.file_parameter or operation.is_download:
        words.append(file)
    if operation.body_parameter:
        for name, value in body.items():
            if name != operation.file_parameter:
                words += _field(operation.body_parameter[1], name, value)
    return words


def _field(model: type[BaseModel], name: str, value: Any) -> Iterator[str]:
    """The option of a field, or one `--set` for each nested value."""
    kind, flag = kind_of(wire_names(model)[name][1]), f"--{name.replace('_', '-')}"
    if kind is FieldKind.FLAG:
        yield flag if value else f"--no-{flag[2:]}"
    elif kind is FieldKind.TEXT:
        yield from (flag, value if isinstance(value, str) else json.dumps(value))
    elif kind is FieldKind.LIST:
        for one in value:
            yield from (flag, one if isinstance(one, str) else json.dumps(one))
    elif kind is FieldKind.PAIRS and all(isinstance(one, str) for one in value.values()):
        for key, text in value.items():
            yield from (flag, f"{key}={text}")
    else:
        for place, inner in _leaves(name, value):
            yield from (
                "--set",
                f"{place}={inner if isinstance(inner, str) else json.dumps(inner)}",
            )


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The nested values of a value by their paths, as `--set` takes them."""
    inner: dict[Any, Any] = {}
    if isinstance(value, dict):
        inner = value
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        inner = dict(enumerate(value))
    if not inner:
        yield place, value
    for key, one in inner.items():
        yield from _leaves(f"{place}.{key}", one)


def example_of(verb: DeclaredVerb) -> str:
    """An example of a command, as people type it: the first request of the operation's own examples."""
    requests = verb.operation.example.requests.values()
    body: dict[str, Any] = next(iter(requests), {})
    is_lines = verb.operation.file_parameter and verb.operation.file_media is JSON_LINES
    words = command_line(verb, PATH_VALUES, body, EXAMPLE_FILE if is_lines else EXAMPLE_FOLDER)
    # A line for each option: the help would break a longer one where a shell does not go on.
    text = "tuneship"
    for word in words:
        text += f" \\\n    {word}" if word.startswith("--") else f" {shlex.quote(word)}"
    return text
