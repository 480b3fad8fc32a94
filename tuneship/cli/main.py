"""The command `tuneship`: groups of declared operations, and the hand-written commands beside them.

Nothing is loaded before somebody names it. A module below has its commands in `app`; the groups of the API come from
the declarations (`declared.py`), and a module's commands join the group of the API's resource.
"""

import os
from collections.abc import Mapping
from importlib import import_module, metadata
from typing import Annotated, Any

import typer

from tuneship.cli.contents import CONTENTS
from tuneship.cli.lazy import Builders, commands_in, group_of, lazy_group

# Commands without a group, by the module that has them.
ALONE = {
    "serve": "serve",
    "openapi": "serve",
    "backup": "backup",
    "restore": "backup",
    "check": "backup",
    "doctor": "doctor",
    "login": "login",
    "logout": "login",
    "whoami": "login",
    "console": "console",
}
# Commands that stand beside the declared ones in a group of the API, and go before one of the same name.
BESIDE = {
    "jobs": ("job_commands", "job_export"),
    "canary": ("canary",),
    "models": ("models", "base_models", "model_cards"),
    "audit": ("audit",),
    "evaluations": ("evaluation_commands", "evaluation_import"),
    "releases": ("releases",),
}


def _module(name: str) -> str:
    return f"tuneship.cli.commands.{name}"


def _pipeline() -> Builders:
    alone = {
        name: lambda name=name: commands_in(_module(name))[name]() for name in ("init", "release")
    }
    return alone | {"rollouts": lambda: group_of(import_module(_module("rollouts")).app)}


def _api() -> Builders:
    from tuneship.cli.declared import resources  # noqa: PLC0415 - starts slowly

    talk = {name: lambda name=name: _talk(name) for name in ("generate", "chat")}
    return talk | {group: lambda group=group: _resource(group) for group in resources()}


def _machine() -> Builders:
    alone = {
        name: lambda name=name, module=module: commands_in(_module(module))[name]()
        for name, module in ALONE.items()
    }
    return {"keys": lambda: group_of(import_module(_module("keys")).app)} | alone


def _talk(name: str) -> Any:
    from tuneship.cli.commands import talk  # noqa: PLC0415 - starts slowly

    return {"generate": talk.generate_command, "chat": talk.chat_command}[name]()


def _resource(group: str) -> Any:
    from tuneship.cli.declared import resources  # noqa: PLC0415 - starts slowly

    def commands() -> Mapping[str, Any]:
        from tuneship.cli.operations import declared_commands  # noqa: PLC0415 - starts slowly

        found = dict(declared_commands(group))
        for module in BESIDE.get(group, ()):
            found |= commands_in(_module(module))
        return found

    text = (type(resources()[group]).__doc__ or "").partition("\n")[0]
    return group_of(
        typer.Typer(cls=lazy_group(commands), no_args_is_help=True, help=text, callback=_nothing)
    )


def _nothing() -> None:
    """Make a group of an app that has no commands of its own."""


app = typer.Typer(
    cls=lazy_group(_pipeline, _api, _machine, contents=CONTENTS),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Tune a language model on your data and ship it safely.",
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        installed = metadata.version("tuneship-client")
        typer.echo(f"tuneship {installed}")
        raise typer.Exit


@app.callback(
    epilog="Commands that call the API end with 0, or 1 when something is wrong (2: the call cannot be read, 130: "
    "Ctrl-C). `release` has codes of its own."
)
def tuneship(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version."),
    ] = False,
) -> None:
    """Tune a language model on your data and ship it safely."""


def main() -> None:
    """Run the command. The entry point of the console script."""
    variables = os.environ  # noqa: TID251 - the shell's variables are no settings
    if variables.get("_TUNESHIP_COMPLETE") != "complete_bash":
        app()
        return
    from tuneship.cli.completion import words_for_bash  # noqa: PLC0415 - starts slowly

    with words_for_bash(variables):
        app()


if __name__ == "__main__":
    main()
