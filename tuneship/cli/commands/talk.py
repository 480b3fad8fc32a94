"""`tuneship generate` and `tuneship chat`: text from a deployment or an endpoint, while it is generated."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from tuneship.cli.connection import connected, reported
from tuneship.cli.fields import BadField
from tuneship.cli.lazy import command_of
from tuneship.cli.operations import with_signature
from tuneship.cli.output import is_terminal, note
from tuneship.cli.parameters import (
    AS_JSON,
    FIELDS,
    HEADERS,
    body_of,
    body_options,
    field_options,
    parameter,
    request_options,
)
from tuneship.cli.streams import show_generation
from tuneship.contract.generation import Generate, generate, generate_by_endpoint

if TYPE_CHECKING:  # starts slowly
    from tuneship.client import Client

# `messages` is what `--params` or a chat gives; the text always streams.
NOT_OFFERED = ("prompt", "messages", "stream")


@dataclass(frozen=True)
class Target:
    """The source of a text: the operation, and the id in its path."""

    call: Callable[..., Any]
    id: str


def target_of(client: "Client", name: str) -> Target:
    """A deployment or an endpoint by its id or its name; endpoints come first. Raises `BadField`."""
    if not (name and name.isprintable()):
        raise BadField("TARGET: must be an id or a name")
    if name.startswith("dep_"):
        return Target(_stream_of(client, generate), name)
    if name.startswith(("ep_", "cep_")):
        return Target(_stream_of(client, generate_by_endpoint), name)
    pages = (client.canary_endpoints.list, client.endpoints.list)
    for page in pages:
        answer: Any = page(name=name)
        entries = getattr(answer, "canary_endpoints", None)
        for endpoint in answer.endpoints if entries is None else entries:
            return Target(_stream_of(client, generate_by_endpoint), endpoint.id)
    for deployment in client.deployments.iterate(limit=100):
        if deployment.deployment_name == name:
            return Target(_stream_of(client, generate), deployment.id)
    raise BadField("TARGET: no endpoint or deployment has this id or name")


def _stream_of(client: "Client", operation: Any) -> Callable[..., Iterator[Any]]:
    return lambda identifier, body: client.stream(operation, identifier, body)


def _target_argument() -> inspect.Parameter:
    info = typer.Argument(
        metavar="TARGET",
        show_default=False,
        help="Id or name of an endpoint or a deployment.",
        autocompletion=_targets,
    )
    return parameter("target", str, info, inspect.Parameter.empty)


def _targets(incomplete: str) -> list[tuple[str, str]]:
    from tuneship.cli.completion import completing  # noqa: PLC0415
    from tuneship.contract.common import (  # noqa: PLC0415
        AnyEndpointId,
        CanaryEndpointId,
        DeploymentId,
    )

    kinds = (CanaryEndpointId, AnyEndpointId, DeploymentId)
    return [word for kind in kinds for word in completing(kind)(incomplete)]


def _routing() -> inspect.Parameter:
    name, text = HEADERS["X-Routing-Key"]
    info = typer.Option("--routing-key", metavar="KEY", help=text, show_default=False)
    return parameter(name, str | None, info)


def generate_command() -> Any:
    """The command `generate`."""
    prompt = typer.Argument(
        metavar="PROMPT",
        show_default=False,
        help="- or nothing reads standard input; an argument can be seen by other users of the machine.",
    )
    parameters = [
        _target_argument(),
        parameter("prompt", str | None, prompt),
        *field_options(Generate, FIELDS, NOT_OFFERED),
        *body_options(Generate),
        _routing(),
        AS_JSON,
    ]
    help_text = "Generate with a deployment or through an endpoint; the text is shown while it is generated."
    return command_of(
        with_signature(_generate, parameters),
        help=help_text,
        epilog="Example:\n\ntuneship generate icd-release --max-tokens 64 < prompt.txt",
    )


def _generate(target: str, prompt: str | None, as_json: bool, **given: Any) -> None:
    with reported():
        is_given = given["params"] is not None or any(
            one.startswith(("prompt", "messages")) for one in given["set_fields"] or ()
        )
        if prompt == "-" or (prompt is None and not is_given):
            if prompt is None and sys.stdin.isatty():
                raise BadField("PROMPT: is needed")
            prompt = sys.stdin.read()
        # By way of the body's own fields, so that a prompt beside `messages` is refused by name.
        body = body_of(Generate, given if prompt is None else {**given, "prompt": prompt})
        with connected(**request_options(given)) as client:
            at = target_of(client, target)
            with closing(at.call(at.id, body)) as pieces:
                show_generation(pieces, as_json)


def chat_command() -> Any:
    """The command `chat`."""
    system = typer.Option(
        "--system", help="The first turn: how the model is to answer.", show_default=False
    )
    parameters = [
        _target_argument(),
        parameter("system", str | None, system),
        *field_options(Generate, FIELDS, NOT_OFFERED),
        _routing(),
        AS_JSON,
    ]
    help_text = (
        "Talk with a deployment or through an endpoint, a line for each turn; Ctrl-D ends it.\n\n"
        "The conversation is kept in memory only. In a pipe every line of standard input is a turn."
    )
    return command_of(
        with_signature(_chat, parameters),
        help=help_text,
        epilog="Example:\n\ntuneship chat icd-release --max-tokens 64",
    )


def _chat(target: str, system: str | None, as_json: bool, **given: Any) -> None:
    from tuneship.client import ApiError  # noqa: PLC0415 - starts slowly
    from tuneship.client.error_text import error_text  # noqa: PLC0415

    turns = [] if system is None else [{"role": "system", "content": system}]
    with reported(), connected(**request_options(given)) as client:
        at = target_of(client, target)
        for line in _lines():
            turns.append({"role": "user", "content": line})
            body = body_of(Generate, given, {"messages": turns})
            try:
                with closing(at.call(at.id, body)) as pieces:
                    answer = show_generation(pieces, as_json)
            except ApiError as error:
                # A person may go on, e.g. with a shorter question; a script must see that it failed.
                if not sys.stdin.isatty():
                    raise
                turns.pop()
                note(error_text(error))
                continue
            turns.append({"role": "assistant", "content": answer or " "})


def _lines() -> Iterator[str]:
    """The turns of the person, a line at a time, until the end of the input."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401, PLC0415 - `input` can be edited with it

    while True:
        try:
            line = input("> " if is_terminal() else "").strip()
        except EOFError:
            note("")
            return
        if line:
            yield line
