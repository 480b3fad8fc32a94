"""Groups that build a command only when it is named, so that `tuneship --help` starts quickly."""

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command, get_group

Builders = Mapping[str, Callable[[], Any]]


def lazy_group(
    *finders: Callable[[], Builders], contents: Mapping[str, Mapping[str, str]] | None = None
) -> type[TyperGroup]:
    """A class for `typer.Typer(cls=...)`: a group with these commands, in this order, after the registered ones.

    A command is looked for from the last finder to the first, so that those which load much stand in front. `contents`:
    what the help of the group says, by panel and command; without it the help loads every command.
    """
    cached = [cache(find) for find in finders]

    class LazyCommands(TyperGroup):
        """A group that builds a command at its first use."""

        def list_commands(self, ctx: Any) -> list[str]:
            names = (name for find in cached for name in find())
            return list(dict.fromkeys([*names, *super().list_commands(ctx)]))

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            if cmd_name not in self.commands:
                for builders in (find() for find in reversed(cached)):
                    if cmd_name in builders:
                        command = builders[cmd_name]()
                        command.name = cmd_name
                        self.commands[cmd_name] = command
                        break
            return super().get_command(ctx, cmd_name)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            TyperGroup.format_help(_listed(self, contents), ctx, formatter)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if self.get_command(ctx, args[0]) is None:
                # A misspelt name is compared with the names of the commands that are built.
                for name in self.list_commands(ctx):
                    self.get_command(ctx, name)
            return super().resolve_command(ctx, args)

    return LazyCommands


def _listed(group: TyperGroup, contents: Mapping[str, Mapping[str, str]] | None) -> TyperGroup:
    """A group with the same help, whose commands do nothing."""
    if contents is None:
        return group
    commands: dict[str, Any] = {
        name: TyperCommand(name, help=sentence, rich_help_panel=panel)
        for panel, sentences in contents.items()
        for name, sentence in sentences.items()
    }
    listed = TyperGroup(name=group.name, commands=commands, help=group.help)
    listed.params, listed.epilog = group.params, group.epilog
    return listed


class UnquotingCommand(TyperCommand):
    """A command that does not repeat surplus words in its error: they may be a patient's text."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of the command line."""
        ctx.allow_extra_args = True
        super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            ctx.fail("too many arguments: a text of several words stands in quotes")
        return ctx.args


def command_of(function: Callable[..., Any], **options: Any) -> Any:
    """One command from a function with typed parameters, as `@app.command(**options)` makes it."""
    app = typer.Typer(add_completion=False)
    app.command(cls=UnquotingCommand, **options)(function)
    return get_command(app)


def group_of(app: typer.Typer) -> Any:
    """The group of an app."""
    return get_group(app)


def commands_in(module: str) -> Builders:
    """The commands of a module's `app`, each by its name."""
    group = get_group(import_module(module).app)
    return {name: lambda name=name: group.commands[name] for name in group.commands}
