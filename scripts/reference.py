"""Writes docs/reference/: settings, fields of release.yaml, hyperparameters, roles, commands and errors, from the code.

python scripts/reference.py            # after a change of a declaration; a test compares
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from pydantic import BaseModel, SecretStr
from pydantic_core import to_jsonable_python
from typer.main import get_command

from flows.forms.release_form import ReleaseParameters
from tuneship import settings
from tuneship.cli.main import app
from tuneship.contract.declaring.scopes import PRESETS, SCOPES
from tuneship.contract.errors import BY_CODE
from tuneship.contract.jobs import Hyperparameters
from tuneship.service.models.hyperparameters import resolved as resolved_hyperparameters

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
Json = dict[str, Any]
# Titles and first paragraphs, by the file's name.
HEADS = {
    "settings.md": """# Settings

Environment variables. All have a default. Lists are separated by commas.""",
    "release-file.md": """# Fields of release.yaml

The parameters of `flows/tune_and_deploy.py`, of `tuneship release` and of the form in Prefect's UI;
`examples/release.yaml` is an example. A field of a list is written with `[]`, or with the entry's `type` in it.""",
    "hyperparameters.md": """# Hyperparameters

`hyperparameters:` of `release.yaml`, `--set hyperparameters.epochs=3` of `tuneship jobs create`, and the same field of
`POST /v1/fine-tuning-jobs`. The record of a job has the values in force.""",
    "roles.md": """# Roles and scopes

`tuneship keys create --scopes trainer` takes roles and scopes, separated by commas. `:read` is to get and list,
`:write` is every change; `endpoints` covers canary endpoints.""",
    "commands.md": """# Commands

Every command of `tuneship`, as `--help` shows it. [command-line.md](../command-line.md) says how they are used.""",
    "errors.md": """# Errors

The body of an error has `code`, `message`, `param`, `request_id` and `details`. A status that is not the first one is
used by single operations, as their descriptions say.""",
}
# An option that so many commands have stands at the top of their page.
SHARED_BY = 8
MADE = "Made by `scripts/reference.py` from the declarations in the code."


def pages() -> dict[str, str]:
    """The text of each page, by its file name."""
    makers = (
        settings_tables,
        release_table,
        hyperparameter_tables,
        roles_table,
        command_tables,
        errors_table,
    )
    return {
        name: "\n\n".join([head, MADE, *make()]) + "\n"
        for (name, head), make in zip(HEADS.items(), makers, strict=True)
    }


def settings_tables() -> list[str]:
    """Every environment variable, by the group that declares it."""
    parts: list[str] = []
    groups = [*settings.ServiceSettings.__mro__[1:], settings.ServiceSettings]
    others = (settings.ClientSettings, settings.PipelineSettings, settings.TrackingSettings)
    for group in (*groups, *others, settings.LocalSettings):
        if not issubclass(group, BaseModel) or not group.__annotations__:
            continue
        schema = group.model_json_schema(by_alias=False)
        own = {
            name: schema["properties"][name]
            for name in group.__annotations__
            if name in schema["properties"]
        }
        rows = [
            (
                f"`TUNESHIP_{name.upper()}`",
                kind(about, schema),
                default_of(group, name),
                text_of(about),
            )
            for name, about in own.items()
        ]
        if rows:
            parts += [f"## {(group.__doc__ or '').partition('.')[0]}", table("variable", rows)]
    return parts


def release_table() -> list[str]:
    """Every field of the file that describes a release, with the fields inside it."""
    schema = ReleaseParameters.model_json_schema()
    return [table("field", list(fields(schema, schema, "")))]


def hyperparameter_tables() -> list[str]:
    """Every hyperparameter, and what `auto` makes of some of them for data and models of several sizes."""
    schema = Hyperparameters.model_json_schema()
    wanted = Hyperparameters(
        learning_rate="auto", batch_size="auto", epochs="auto", warmup_steps="auto"
    )
    names = ("learning_rate", "batch_size", "epochs", "warmup_steps")
    lines = [f"| rows | parameters | {' | '.join(names)} |", "|---|---|" + "---|" * len(names)]
    for examples in (20, 100, 1_000, 10_000, 100_000):
        for size in (1, 8):
            chosen = resolved_hyperparameters(
                wanted, examples=examples, has_validation_set=True, parameters=size * 10**9
            )
            cells = " | ".join(str(chosen[name]) for name in names)
            lines.append(f"| {examples:,} | {size} B | {cells} |")
    return [
        table("field", list(fields(schema, schema, ""))),
        "## Chosen by `auto`",
        "From the training rows, where validation has a file of its own, and the parameters of the model:",
        "\n".join(lines),
    ]


def roles_table() -> list[str]:
    """What each preset of a key may do."""
    presets = "".join(f" {name} |" for name in PRESETS)
    lines = [f"| scope |{presets}", "|---|" + "---|" * len(PRESETS)]
    for scope in sorted(SCOPES):
        marks = "".join(" yes |" if scope in held else " |" for held in PRESETS.values())
        lines.append(f"| `{scope}` |{marks}")
    return ["\n".join(lines)]


def command_tables() -> list[str]:
    """Every command with its arguments and options; those of many commands stand at the top."""
    root = get_command(app)
    found = dict(commands(root, typer.Context(root, info_name="tuneship"), "tuneship"))
    shared = Counter(row for _, rows in found.values() for row in rows if row[0].startswith("--"))
    common = sorted(row for row, count in shared.items() if count >= SHARED_BY and row[1])
    head = "| | meaning |\n|---|---|\n"
    parts = ["## Options of many commands", head + "\n".join(map(option_row, common))]
    for path, (text, rows) in found.items():
        own = [row for row in rows if row not in common]
        also = ", ".join(f"`{names.split()[0]}`" for names, _ in rows if (names, _) in common)
        parts += [f"## {path}", text]
        if own:
            parts.append(head + "\n".join(map(option_row, own)))
        if also:
            parts.append(f"Also {also}.")
    return parts


def commands(command: Any, context: Any, path: str) -> Iterator[tuple[str, tuple[str, list[Any]]]]:
    """Each command below a group by its path, with its help and the rows of its parameters."""
    if not hasattr(command, "list_commands"):
        records = [one.get_help_record(context) for one in command.params]
        rows = [(names, first_paragraph(text)) for names, text in filter(None, records)]
        yield path, (first_paragraph(command.help), rows)
        return
    for name in command.list_commands(context):
        one = command.get_command(context, name)
        if not one.hidden:
            yield from commands(
                one, typer.Context(one, info_name=name, parent=context), f"{path} {name}"
            )


def option_row(row: tuple[str, str]) -> str:
    """A row for an argument or option, with the words of the declarations for what is required and off."""
    names, text = row
    text = re.sub(r" *\[default: no-[^]]*\]", "", text).replace("Needed.", "[required]")
    return f"| `{names.replace('|', chr(92) + '|')}` | {text} |"


def errors_table() -> list[str]:
    """Every error of the API."""
    rows = [
        (
            f"`{error.code}`",
            ", ".join(map(str, error.statuses)),
            f"`{error.__name__}`",
            first_paragraph(error.__doc__),
        )
        for _, error in sorted(BY_CODE.items())
    ]
    head = "| code | status | in Python | meaning |\n|---|---|---|---|\n"
    return [head + "\n".join(f"| {' | '.join(row)} |" for row in rows)]


def fields(about: Json, root: Json, path: str) -> Iterator[Sequence[str]]:
    """A row for each field below a schema, with its path, in the order of declaration."""
    for name, field in about.get("properties", {}).items():
        here = f"{path}{name}"
        default = "" if name in about.get("required", ()) else shown(field.get("default"))
        yield f"`{here}`", kind(field, root), default, text_of(field)
        for inner in objects(field, root):
            yield from fields(inner, root, f"{here}.")
        for item in items(field, root):
            for inner in objects(item, root):
                # Entries of several kinds have other fields each.
                chosen = inner["properties"].get("type", {}).get("const", "")
                yield from fields(inner, root, f"{here}[{chosen}].")


def alternatives(field: Json) -> list[Json]:
    """The forms that a value may have, without null."""
    forms = field.get("anyOf") or field.get("oneOf") or field.get("allOf") or [field]
    return [form for form in forms if form.get("type") != "null"]


def resolved(form: Json, root: Json) -> Json:
    """The schema behind a reference."""
    return root["$defs"][form["$ref"].rpartition("/")[2]] if "$ref" in form else form


def objects(field: Json, root: Json) -> Iterator[Json]:
    """The objects with declared fields among a field's forms."""
    for form in alternatives(field):
        found = resolved(form, root)
        if "properties" in found:
            yield found


def items(field: Json, root: Json) -> Iterator[Json]:
    """The schema of the entries of a list, if the field is one."""
    for form in alternatives(field):
        found = resolved(form, root)
        if found.get("type") == "array" and "items" in found:
            yield found["items"]


def kind(field: Json, root: Json) -> str:
    """The type of a field in words, with its limits."""
    return " or ".join(
        dict.fromkeys(one_kind(resolved(form, root), root) for form in alternatives(field))
    )


def one_kind(form: Json, root: Json) -> str:
    """The type of one form of a value."""
    if "const" in form:
        return f"`{form['const']}`"
    if "enum" in form:
        return ", ".join(f"`{value}`" for value in form["enum"])
    if forms := form.get("anyOf") or form.get("oneOf"):
        return " or ".join(dict.fromkeys(one_kind(resolved(one, root), root) for one in forms))
    if form.get("type") == "array":
        return f"list of {kind(form['items'], root)}" if "items" in form else "list"
    names = {
        "integer": "integer",
        "number": "number",
        "string": "text",
        "boolean": "true or false",
        "object": "fields",
    }
    name = names.get(form.get("type", ""), "text")
    low = form.get("minimum", form.get("exclusiveMinimum"))
    high = form.get("maximum", form.get("exclusiveMaximum"))
    above = "over" if "exclusiveMinimum" in form else "from"
    below = "under" if "exclusiveMaximum" in form else "to"
    # The largest integer that is stored is no limit to a reader.
    has_high = high is not None and high < 2**53
    limits = [f"{above} {low}"] * (low is not None) + [f"{below} {high}"] * has_high
    return " ".join([name, *limits])


def default_of(group: type[BaseModel], name: str) -> str:
    """The default of a setting, with the home directory as `~`."""
    value = group.model_fields[name].get_default(call_default_factory=True)
    text = shown(None if isinstance(value, SecretStr) else to_jsonable_python(value))
    return text.replace(str(settings.HOME), "~/.tuneship")


def shown(value: Any) -> str:
    """A default as one writes it; empty for none."""
    empty = value is None or value in ("", [], {})
    return (
        ""
        if empty or isinstance(value, Mapping)
        else f"`{value if isinstance(value, str) else json.dumps(value)}`"
    )


def text_of(about: Json) -> str:
    """The first paragraph of a description, for a cell."""
    return first_paragraph(about.get("description"))


def first_paragraph(text: str | None) -> str:
    """The first paragraph on one line, for a cell."""
    return " ".join((text or "").split("\n\n")[0].split()).replace("|", "\\|")


def table(first: str, rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table of fields."""
    head = f"| {first} | value | default | meaning |\n|---|---|---|---|\n"
    return head + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> int:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
