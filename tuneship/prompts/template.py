"""The chat template of a model, which turns messages into the text that the model reads.

Training and serving render with this same class. Knows neither tokens nor models. Next:
`tuneship/training/objective.py` (which part of the text is learnt).
"""

import json
import re
import traceback
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateAssertionError, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from tuneship.prompts.bounded_jinja import BoundedEnvironment
from tuneship.prompts.template_budget import (
    ANYWHERE,
    PLAIN,
    NotAllowed,
    RenderingTooLong,
    RenderLimits,
    rendered,
)
from tuneship.prompts.tool_syntax import (
    PRELUDE,
    CallSyntax,
    shows_system_turns,
    shows_tools,
    syntax_of,
)
from tuneship.security.sealed_files import read_plain, write_sealed

TEMPLATE_FILE = "chat_template.jinja"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
# The files that a template is loaded from; each may be missing.
TEMPLATE_FILES = (TEMPLATE_FILE, SPECIAL_TOKENS_FILE, TOKENIZER_CONFIG_FILE)
# Where transformers keeps the templates of other names than `default`.
NAMED_TEMPLATES_FOLDER = "additional_chat_templates"
SPECIAL_TOKEN_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
)

# jinja's error text for a name that it does not know when it renders.
NO_SUCH_NAME = re.compile(r"(?:No (?:filter|test) named )?'(\w+)'(?: found\.| is undefined|\.)")

# For a base model without a template. Each turn ends in the end token or a blank line. The prompt ends in no space: a
# tokenizer would join it with the first word of the answer.
BUILT_IN_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ 'Assistant: ' + message['content'] + eos_token + '\\n\\n' }}
{%- else -%}
{{ message['role'] | capitalize + ': ' + message['content'] + '\\n\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}
"""
# Stands before a template that writes nothing behind an answer: puts the end token behind each. TRIM is empty, or the
# filter that the template itself applies. The last tag keeps the template's first white space.
ENDING = """\
{%- set ended = namespace(turns=[]) -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' and message.content is string and not message.tool_calls -%}
{%- set ended.turns = ended.turns + [{'role': 'assistant', 'content': message.content TRIM ~ END}] -%}
{%- else -%}
{%- set ended.turns = ended.turns + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = ended.turns -%}{{ '' }}"""
# Two named templates as one, with which transformers and llama.cpp render the same.
BY_TOOLS = """\
{%- set asked = namespace(calls=false) -%}
{%- for message in messages -%}{%- if message.tool_calls -%}{%- set asked.calls = true -%}{%- endif -%}{%- endfor -%}
{%- if tools or asked.calls -%}{{ '' }}TOOL_USE{{ '' }}\
{%- else -%}{{ '' }}DEFAULT{{ '' }}{%- endif -%}"""


class TemplateFailed(Exception):
    """The template is not valid, or refuses these messages. The error text quotes no message."""


class TemplateTooSlow(TemplateFailed):
    """The template would compute or write more than it may."""


class _GenerationTag(Extension):
    """Accepts the `{% generation %}` block of many hub templates, and renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance-wide set)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class PromptTemplate:
    """Renders messages as the text that one family of models was trained on.

    Hub templates are programs, and callers choose their messages: they run in a sandbox that bounds their work.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], today: datetime | None = None
    ) -> None:
        """`special_tokens` maps names (`eos_token`, ...) to their text. Raises TemplateFailed for an invalid source.

        `today` is the time that a template with a date writes; None: the time of rendering.
        """
        self.source = source
        self._today = today
        self.special_tokens = dict(special_tokens)
        environment = BoundedEnvironment(
            [_GenerationTag, "jinja2.ext.loopcontrols"],
            # The local date, as transformers has it: `%Y` of a template means that of the reader.
            now=lambda: self._today or datetime.now(),  # noqa: DTZ005
        )
        try:
            self._template = environment.from_string(source)
        # Not only of jinja: an expression may be too deep for Python, or a number too long.
        except (TemplateError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
            # The error text of a filter or test that is not there quotes the template, and no message.
            is_name = isinstance(error, TemplateAssertionError)
            why = str(error)[:200] if is_name else type(error).__name__
            raise TemplateFailed(f"the chat template is not valid: {why}") from error

    @classmethod
    def load(
        cls, directory: Path, key: str | None = None, base: Path | None = None
    ) -> "PromptTemplate":
        """Load the template of a model or adapter directory, or the built-in one where it has none.

        `key` opens sealed files. `base` is the directory of an adapter's base model: its special tokens stand for those
        that the adapter's directory does not name. Raises TemplateFailed.
        """
        source, tokens = read_template(directory, key, base)
        return cls(BUILT_IN_TEMPLATE if source is None else source, tokens)

    def save(self, directory: Path, key: str | None = None) -> None:
        """Write the template and its special tokens; `key` seals the files.

        An adapter's directory has no tokenizer; with these files it renders the same text as its base model's.
        """
        write_sealed(directory / TEMPLATE_FILE, key, self.source.encode())
        tokens = json.dumps(self.special_tokens, indent=2, ensure_ascii=False)
        write_sealed(directory / SPECIAL_TOKENS_FILE, key, f"{tokens}\n".encode())

    def ending_answers_with(self, end: str) -> "PromptTemplate":
        """The same template with the text `end` after the content of each answer."""
        asked = {"role": "user", "content": "zqask"}
        spaced = self._rendered(
            [asked, {"role": "assistant", "content": " zqanswer "}], add_generation_prompt=False
        )
        trim = "" if spaced is None or "zqanswer " in spaced else "| trim"
        ending = ENDING.replace("TRIM", trim).replace("END", json.dumps(end, ensure_ascii=False))
        return self._with_source(ending + self.source)

    def dated(self, today: datetime) -> "PromptTemplate":
        """The same template, which writes this date whenever it renders."""
        return PromptTemplate(self.source, self.special_tokens, today)

    def _with_source(self, source: str) -> "PromptTemplate":
        return PromptTemplate(source, self.special_tokens, self._today)

    @cached_property
    def with_tools(self) -> "PromptTemplate":
        """The template itself if it writes functions and calls; else a copy that does, and writes everything else
        alike.
        """
        if shows_tools(self._rendered):
            return self
        place = "system" if shows_system_turns(self._rendered) else "user"
        return self._with_source(PRELUDE.replace("PLACE", place).strip() + self.source)

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
        """The text as this template itself writes it; None if it refuses the messages."""
        try:
            return self._render(messages, add_generation_prompt, tools, PLAIN)
        except TemplateFailed:
            return None

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None = None,
        limits: RenderLimits = ANYWHERE,
    ) -> str:
        """The text of `messages`; with `add_generation_prompt`, followed by the beginning of an assistant turn.

        `tools` are functions that the model may call, as OpenAI's API has them. The arguments of a call are an object,
        not its JSON. Raises TemplateFailed when the template refuses the messages (unknown role, wrong order), and
        TemplateTooSlow beyond `limits`.
        """
        has_tools = bool(tools) or any(message.get("tool_calls") for message in messages)
        template = self.with_tools if has_tools else self
        return template._render(messages, add_generation_prompt, tools or None, limits)  # noqa: SLF001 - of the same class

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, object]] | None,
        limits: RenderLimits = ANYWHERE,
    ) -> str:
        given: dict[str, Any] = {
            "messages": messages,
            "tools": tools,
            "documents": None,  # as transformers does, since templates ask whether it is none
            "add_generation_prompt": add_generation_prompt,
            **self.special_tokens,
        }
        try:
            return rendered(lambda: self._template.render(given), limits)
        except (RenderingTooLong, RecursionError, MemoryError) as error:
            why = str(error) if isinstance(error, RenderingTooLong) else "it computes for too long"
            raise TemplateTooSlow(f"the chat template cannot write these messages: {why}") from None
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
            AttributeError,
            AssertionError,
            RuntimeError,
        ) as error:
            raise TemplateFailed(
                f"the chat template refuses these messages: {self._reason(error)}"
            ) from None

    def _reason(self, error: Exception) -> str:
        """Why the template failed."""
        text = str(error)
        # The text of an error may quote a message. One that stands in the template does not.
        if isinstance(error, TemplateError) and text and text in self.source:
            return text
        missing = [name for name in SPECIAL_TOKEN_NAMES if text == f"'{name}' is undefined"]
        if missing:
            return f"it needs {missing[0]}, which tokenizer_config.json does not name"
        unknown = NO_SUCH_NAME.fullmatch(text)
        if isinstance(error, NotAllowed) or (unknown and unknown[1] in self.source):
            return text
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if frame.filename == "<template>"
        ]
        return f"{type(error).__name__} in its line {lines[-1]}" if lines else type(error).__name__


def read_template(
    directory: Path, key: str | None = None, base: Path | None = None
) -> tuple[str | None, dict[str, str]]:
    """The source of a directory's template (None without one), and its special tokens, as `PromptTemplate.load` reads
    them.

    Nothing is compiled, so it costs no more than reading the files. Raises TemplateFailed.
    """
    config = _read_json(directory / TOKENIZER_CONFIG_FILE, key)
    file = directory / TEMPLATE_FILE
    if file.is_file():
        # As in transformers, files replace all that the configuration says.
        sources = {"default": read_plain(file, key).decode()}
        sources |= {
            named.stem: named.read_text(encoding="utf-8")
            for named in (directory / NAMED_TEMPLATES_FOLDER).glob("*.jinja")
        }
    else:
        sources = _named_sources(config.get("chat_template"))
    tokens = _special_tokens(directory, config, key)
    if base is not None:
        base_config = _read_json(base / TOKENIZER_CONFIG_FILE, None)
        tokens = _special_tokens(base, base_config, None) | tokens
    return (_one_source(sources) if sources else None), tokens


def _read_json(path: Path, key: str | None) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. Raises TemplateFailed for another value."""
    try:
        read: object = json.loads(read_plain(path, key))
    except FileNotFoundError:
        return {}
    if not isinstance(read, dict):
        raise TemplateFailed(f"{path.name} is not an object")
    return cast("dict[str, Any]", read)


def _named_sources(setting: object) -> dict[str, str]:
    """The templates of a tokenizer's configuration by name, from one text or a list. Raises TemplateFailed."""
    if not setting:
        return {}
    if isinstance(setting, str):
        return {"default": setting}
    try:
        entries = cast("Any", setting)
        pairs = (
            entries.items()
            if isinstance(entries, dict)
            else [(entry["name"], entry["template"]) for entry in entries]
        )
        return {str(name): str(source) for name, source in pairs}
    except (TypeError, KeyError) as error:
        raise TemplateFailed("the chat templates of the tokenizer are no list of names") from error


def _one_source(sources: Mapping[str, str]) -> str:
    """The template that transformers would choose: `tool_use` with functions, else `default`. Raises TemplateFailed."""
    if "default" not in sources:
        names = ", ".join(sorted(sources))
        raise TemplateFailed(f"none of its chat templates is named default: they are {names}")
    default, with_tools = sources["default"], sources.get("tool_use")
    if with_tools is None:
        return default
    # Jinja drops one line break at the end of a source.
    parts = {"TOOL_USE": with_tools, "DEFAULT": default}
    whole = BY_TOOLS
    for name, source in parts.items():
        before, after = whole.split(name, 1)
        whole = before + source.removesuffix("\n") + after
    return whole


def _special_tokens(directory: Path, config: Mapping[str, Any], key: str | None) -> dict[str, str]:
    """The text of each special token that a directory names, by the rules of transformers' `from_pretrained`."""
    settings = dict(config)
    # Since transformers 4.34, the configuration lists the added tokens, and then it alone decides.
    if "added_tokens_decoder" not in settings:
        settings |= _read_json(directory / SPECIAL_TOKENS_FILE, key)
    # Written as a string, or as an object with the string under `content`.
    values = {name: settings.get(name) for name in SPECIAL_TOKEN_NAMES}
    texts = {
        name: value["content"] if isinstance(value, dict) else value
        for name, value in values.items()
    }
    return {name: str(text) for name, text in texts.items() if text is not None}
