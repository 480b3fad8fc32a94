"""Runs a declared command: makes the call, and shows its answer, its stream, or every page of its list."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tuneship.cli.connection import connected, reported
from tuneship.cli.declared import DeclaredVerb, verbs_of
from tuneship.cli.examples import example_of
from tuneship.cli.fields import BadField
from tuneship.cli.lazy import Builders, command_of
from tuneship.cli.output import (
    Row,
    columns_of,
    entries_field,
    note,
    readable,
    show_fields,
    show_json,
    show_rows,
    write,
)
from tuneship.cli.parameters import arguments_of, parameters_of, request_options
from tuneship.cli.streams import show_entries, show_generation
from tuneship.cli.uploads import opened_file, opened_folder, progress_bar
from tuneship.contract.common import count
from tuneship.contract.declaring.operation import JSON_LINES

if TYPE_CHECKING:  # starts slowly
    from tuneship.client import Client

# A broken connection to a stream is opened again so often, with pauses, before the command gives up.
FOLLOWING_TRIES = 20


def declared_commands(group: str) -> Builders:
    """The commands of a resource, by name."""
    return {
        name: lambda verb=verb: declared_command(verb) for name, verb in verbs_of(group).items()
    }


def declared_command(verb: DeclaredVerb) -> Any:
    """The command of a declared operation."""
    function = with_signature(lambda **given: run(verb, given), parameters_of(verb))
    epilog = f"Example:\n\n{escaped(example_of(verb))}"
    return command_of(function, help=escaped(verb.sentence), epilog=epilog)


def escaped(text: str) -> str:
    """A text with its square brackets escaped, since the help reads them as markup."""
    from rich.markup import escape  # noqa: PLC0415 - starts slowly

    return escape(text)


def with_signature(
    function: Callable[..., Any], parameters: Iterable[inspect.Parameter]
) -> Callable[..., Any]:
    """The function with these parameters, which Typer reads."""

    def command(**given: Any) -> None:
        function(**given)

    vars(command)["__signature__"] = inspect.Signature(list(parameters))
    return command


def run(verb: DeclaredVerb, given: dict[str, Any]) -> None:
    """Run a declared command with the arguments of the command line."""
    with reported():
        options = request_options(given)
        arguments = arguments_of(verb.operation, given)
        operation, as_json = verb.operation, bool(given["as_json"])
        body = arguments.get(operation.body_parameter[0]) if operation.body_parameter else None
        with connected(**options) as client:
            if given.get("follow"):
                if "limit" in arguments:
                    raise BadField("--limit: does not bound a stream, leave it out with --follow")
                # A wrong address or id is reported at once; only a connection that worked is waited for.
                client.call(operation, **arguments, limit=1)
                patient = client.with_options(tries=FOLLOWING_TRIES)
                with closing(patient.follow_job(**arguments)) as entries:
                    show_entries(entries, as_json)
            elif getattr(body, "stream", False):
                with closing(client.stream(operation, **arguments)) as pieces:
                    show_generation(pieces, as_json)
            elif given.get("every_page") and verb.paged:
                _show_every_page(client, verb, arguments, as_json)
            elif operation.is_download:
                _download(client, verb, arguments, given["target"], as_json)
            elif operation.file_parameter:
                reply = _upload(client, verb, arguments, given)
                show_reply(verb, reply, as_json)
                # A shell script that checks a file must not go on with one that has errors.
                if getattr(reply, "is_valid", True) is False:
                    raise typer.Exit(1)
            else:
                show_reply(verb, client.call(operation, **arguments), as_json)


def _upload(
    client: "Client", verb: DeclaredVerb, arguments: dict[str, Any], given: Mapping[str, Any]
) -> Any:
    """Send the file under a progress bar, which is removed before the reply is shown."""
    name = str(verb.operation.file_parameter)
    file: Path = given[name]
    is_lines = verb.operation.file_media is JSON_LINES
    source = opened_file(file, given.get("columns")) if is_lines else opened_folder(file)
    # The service checks every line before it answers, which may take longer than sending them.
    bar = progress_bar(file.name, "the service is checking it")
    with bar as progress, source as opened:
        watched = client if progress is None else client.with_options(progress=progress)
        return watched.call(verb.operation, **arguments, **{name: opened})


def _download(
    client: "Client", verb: DeclaredVerb, arguments: dict[str, Any], target: Path, as_json: bool
) -> None:
    from tuneship.client import SourceError  # noqa: PLC0415 - starts slowly

    note("the service makes the export and compares it")
    try:
        with progress_bar(target.name) as progress:
            watched = client if progress is None else client.with_options(progress=progress)
            folder = watched.download(target, verb.operation, **arguments)
    except SourceError as error:
        raise BadField(f"FOLDER: {error}") from None
    files = sorted(file.name for file in folder.iterdir())
    if as_json:
        show_json({"folder": str(folder), "files": files})
    else:
        write(f"{count(len(files), 'file')} in {folder}")


def show_reply(verb: DeclaredVerb, reply: Any, as_json: bool) -> None:
    """Show one answer: a list as a table, anything else field by field."""
    content: Row = verb.operation.reply_type.dump_python(reply, mode="json", by_alias=True)
    place = entries_field(verb.operation.hints["return"])
    if as_json:
        show_json(content)
    elif verb.operation.is_text:
        write(readable(str(content)), end="")
    elif place is None:
        show_fields(content)
    else:
        show_rows(content[place[0]], columns_of(place[1]))
        pages = content.get("pagination") or {}
        if pages.get("next_offset") is not None:
            shown = len(content[place[0]])
            note(
                f"{shown} of {pages['total']}: --offset {pages['next_offset']} continues, --all fetches every one"
            )


def _show_every_page(
    client: "Client", verb: DeclaredVerb, arguments: dict[str, Any], as_json: bool
) -> None:
    place = entries_field(verb.operation.hints["return"])
    paged = verb.paged
    if place is None or paged is None:
        raise TypeError(f"{verb.operation.name} is no list")

    def rows() -> Iterator[Row]:
        for entry in client.walk(paged, arguments):
            yield entry.model_dump(mode="json", by_alias=True)

    if as_json:
        for row in rows():
            show_json(row, is_stream=True)
    else:
        show_rows(rows(), columns_of(place[1]))
