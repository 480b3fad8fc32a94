"""Every declared operation is a command, and its help ends with an example that means the contract's own example."""

import io
import shlex
from typing import Any

import pytest
from typer.main import get_command

from tuneship.cli.declared import DeclaredVerb, resources, verbs_of
from tuneship.cli.examples import EXAMPLE_FILE, EXAMPLE_FOLDER, example_of
from tuneship.cli.main import app
from tuneship.cli.operations import declared_command
from tuneship.cli.parameters import arguments_of, parameters_of
from tuneship.contract.declaring.examples import PATH_VALUES
from tuneship.contract.declaring.operation import DECLARED, JSON_LINES

VERBS = [verb for group in resources() for verb in verbs_of(group).values()]
IDS = [f"{verb.group} {verb.name}" for verb in VERBS]


def test_every_declared_operation_has_a_command() -> None:
    root: Any = get_command(app)
    commands = {}
    for group in root.list_commands(None):
        inside: Any = root.get_command(None, group)
        for name in getattr(inside, "commands", {}) or ():
            commands[group, name] = inside
        if hasattr(inside, "list_commands"):
            commands |= {
                (group, name): inside.get_command(None, name) for name in inside.list_commands(None)
            }
    assert {verb.operation.name for verb in VERBS} == {one.name for one in DECLARED}
    assert {(verb.group, verb.name) for verb in VERBS} <= set(commands)


@pytest.mark.parametrize("verb", VERBS, ids=IDS)
def test_the_parameters_of_a_command_have_different_names(verb: DeclaredVerb) -> None:
    names = [one.name for one in parameters_of(verb)]
    assert len(names) == len(set(names))
    flags = [
        flag for one in declared_command(verb).params for flag in (*one.opts, *one.secondary_opts)
    ]
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("verb", VERBS, ids=IDS)
def test_the_example_of_the_help_is_the_example_of_the_contract(verb: DeclaredVerb) -> None:
    words = shlex.split(example_of(verb).replace("\\\n", ""))
    assert words[:3] == ["tuneship", verb.group, verb.name]
    command = declared_command(verb)
    with command.make_context("x", words[3:], resilient_parsing=False) as context:
        given = context.params
    operation = verb.operation
    with io.BytesIO() as file:
        files = {operation.file_parameter: file} if operation.file_parameter else {}
        call = operation.bind(**arguments_of(operation, given), **files)
        body = dict(next(iter(operation.example.requests.values()), {}))
        if operation.file_parameter:
            is_lines = operation.file_media is JSON_LINES
            example = EXAMPLE_FILE if is_lines else EXAMPLE_FOLDER
            assert str(given[operation.file_parameter]) == example
            body.pop(operation.file_parameter)
        sent = call.form if operation.is_form else call.body
        expected = {operation.body_parameter[0]: body} if operation.body_parameter else {}
        path = {name: PATH_VALUES.get(name, name.upper()) for name in operation.path_parameters}
        if operation.body_parameter:
            expected[operation.body_parameter[0]] = operation.body_parameter[1].model_validate(body)
        wanted = operation.bind(**path, **expected, **files)
    assert (call.path, call.query, sent) == (
        wanted.path,
        wanted.query,
        wanted.form if operation.is_form else wanted.body,
    )
