"""The chat template of a model, which turns messages into the text that the model reads.

Training and serving render with this same class. Knows neither tokens nor models. Next:
`tuneship/training/objective.py` (which part of the text is learnt).
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tuneship.security.sealed_files import read_plain, write_sealed
from tuneship.tool_syntax import (
    PRELUDE,
    CallSyntax,
    shows_system_turns,
    shows_tools,
    syntax_of,
)

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# The files that a template is loaded from; each may be missing.
TEMPLATE_FILES = (TEMPLATE_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE)
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")

# For a base model without a template. Each turn ends in the end token or a blank line.
BUILT_IN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ 'Assistant: ' + message['content'] + eos_token + '\\n\\n' }}
{%- else -%}
{{ message['role'] | capitalize + ': ' + message['content'] + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant: ' }}{%- endif -%}
"""


class TemplateFailed(Exception):
    """The template is not valid, or refuses these messages. The error text quotes no message."""


class _GenerationTag(Extension):
    """Accepts the `{% generation %}` block of many hub templates, and renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance-wide set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PromptTemplate:
    """Renders messages as the text that one family of models was trained on.

    Hub templates are untrusted programs: they run in jinja2's immutable sandbox.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` maps names (`eos_token`, ...) to their text. Raises TemplateFailed for an invalid source."""
        self.source = source
        self.special_tokens = dict(special_tokens)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            autoescape=False,  # the output is a prompt, not a page
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_template_error
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TemplateFailed(
                f"the chat template is not valid: {type(error).__name__}"
            ) from error

    @classmethod
    def load(
        cls, directory: Path, key: str | None = None, base: Path | None = None
    ) -> "PromptTemplate":
        """Load the template of a model or adapter directory, or the built-in one where it has none.

        `key` opens sealed files. `base` is the directory of an adapter's base model: its special tokens stand for those
        that the adapter's directory does not name. Raises TemplateFailed.
        """
        tokenizer_config = _read_json(directory / TOKENIZER_CONFIG_FILE, key)
        file = directory / TEMPLATE_FILE
        if file.is_file():
            source = read_plain(file, key).decode()
        else:
            # Older models keep it in tokenizer_config.json, a few as a list of named templates.
            source = tokenizer_config.get("chat_template")
            if isinstance(source, list):
                source = {entry["name"]: entry["template"] for entry in source}.get("default")
            source = source or BUILT_IN_TEMPLATE
        tokens = _read_json(directory / SPECIAL_TOKENS_FILE, key) | tokenizer_config
        found = _special_tokens(tokens)
        if base is not None:
            inherited = _read_json(base / SPECIAL_TOKENS_FILE, None)
            inherited |= _read_json(base / TOKENIZER_CONFIG_FILE, None)
            found = _special_tokens(inherited) | {k: v for k, v in found.items() if k in tokens}
        return cls(source, found)

    def save(self, directory: Path, key: str | None = None) -> None:
        """Write the template and its special tokens; `key` seals the files.

        An adapter's directory has no tokenizer; with these files it renders the same text as its base model's.
        """
        write_sealed(directory / TEMPLATE_FILE, key, self.source.encode())
        tokens = json.dumps(self.special_tokens, indent=2, ensure_ascii=False)
        write_sealed(directory / SPECIAL_TOKENS_FILE, key, f"{tokens}\n".encode())

    @cached_property
    def with_tools(self) -> "PromptTemplate":
        """The template itself if it writes functions and calls; else one that does, and writes all the rest as it."""
        if shows_tools(self._rendered):
            return self
        place = "system" if shows_system_turns(self._rendered) else "user"
        return PromptTemplate(
            PRELUDE.replace("PLACE", place).strip() + self.source, self.special_tokens
        )

    @cached_property
    def call_syntax(self) -> CallSyntax | None:
        """How `with_tools` writes calls; None where that is no text around names and JSON objects."""
        return syntax_of(self.with_tools._rendered)  # noqa: SLF001 - of the same class

    def _rendered(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str | None:
        """The text as this very template writes it; None where it refuses the messages."""
        try:
            return self._render(messages, add_generation_prompt, tools)
        except TemplateFailed:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None = None,
    ) -> str:
        """The text of `messages`; with `add_generation_prompt`, followed by the beginning of an assistant turn.

        `tools` are functions that the model may call, as OpenAI's API has them. The arguments of a call are an object,
        not its JSON. Raises TemplateFailed when the template refuses the messages (unknown role, wrong order).
        """
        has_tools = bool(tools) or any(message.get("tool_calls") for message in messages)
        template = self.with_tools if has_tools else self
        return template._render(messages, add_generation_prompt, tools or None)  # noqa: SLF001 - of the same class

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
    ) -> str:
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,  # as transformers does, since templates ask whether it is none
                add_generation_prompt=add_generation_prompt,
                **self.special_tokens,
            )
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            # The error text may quote a message, so only the type is reported.
            raise TemplateFailed(
                f"the chat template refuses these messages: {type(error).__name__}"
            ) from None


def _read_json(path: Path, key: str | None) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    try:
        return json.loads(read_plain(path, key))
    except FileNotFoundError:
        return {}


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The text of each special token."""
    # Written as a string, or as an object with the string under `content`.
    values = {name: settings.get(name) or "" for name in SPECIAL_TOKEN_NAMES}
    texts = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return {name: str(text) for name, text in texts.items()}


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, **options: Any) -> str:
    """The `tojson` filter of transformers; jinja2's own escapes `<` for HTML and so changes prompts."""
    return json.dumps(value, **{"ensure_ascii": False, **options})
