"""Reads a JSON Lines file once, line by line: upload, validate and merge share this reader and its verdict.

Parsing and counting overlap: batches of examples are tokenized in a second thread. Memory stays below 64 MiB for any
file: two batches, 1,000 problems and 5 bytes for each line, to find repetitions. Knows no HTTP and
no database. Next: `hints.py` (warnings), `advice.py` (suggestions), `token_counting.py`.
"""

import json
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from tuneship.contract.datasets import LineProblem
from tuneship.contract.lines.dataset_lines import (
    LINE_LIMIT_BYTES,
    DatasetFormat,
    Message,
    decode_line,
    parse_example,
    text_of,
    text_places,
)
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.line_fields import other_names, unused_fields
from tuneship.contract.lines.reading_lines import BYTE_ORDER_MARK, lines_up_to
from tuneship.contract.lines.tool_lines import tools_of
from tuneship.prompts.template import TemplateFailed
from tuneship.prompts.text_tokenizer import encode
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.datasets.hints import SeenExamples, TextHints
from tuneship.service.datasets.rendering import check_rendering
from tuneship.service.datasets.token_counting import CHARACTERS_AT_ONCE, TokenCounter

FILE_LIMIT = 2 << 30
LINES_LIMIT = 5_000_000
# Errors, and also warnings, that are listed at most; all are counted.
REPORTED_PROBLEMS = 1000
# Batches in flight in the counting thread.
BATCHES_AHEAD = 2
# Most lines in a batch: a parsed line takes about a kilobyte, however short it is.
LINES_AT_ONCE = 2048
# Expected length of a line; the table of repetitions grows when lines are shorter.
EXPECTED_LINE_BYTES = 256
# Stands for the functions of an example where only what a template adds to them is counted.
NO_TOOL: list[dict[str, Any]] = [{"type": "function", "function": {"name": ""}}]
# Fields that nobody reads are named in suggestions: so many, and by such names. Others may be somebody's text.
NAMED_FIELDS = 10
NAME = re.compile(
    r"(?:(?:messages|conversations|prompt|completion)\[\]\.)?[A-Za-z_][A-Za-z0-9_]{0,31}"
)
# Fields of lines that no training here can use, each for a reason of its own (`advice.py`).
OTHER_SHAPES = ("text", "chosen", "preferred_output", "input_ids")
COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class ReadExample(NamedTuple):
    """A valid line: its number, its turns, and its listed functions as text."""

    line: int
    messages: list[Message]
    tools: str = ""

    @property
    def texts(self) -> list[str]:
        """The texts of the turns, and of the functions."""
        return [*map(text_of, self.messages), *([self.tools] if self.tools else [])]


class ReadingStopped(Exception):
    """The service shuts down; the file has to be read again."""


@dataclass(frozen=True)
class Plan:
    """How a file is to be read."""

    format: DatasetFormat
    # The model whose tokenizer counts; None: only examples and repetitions are counted.
    base: CataloguedModel | None
    # Called between batches; True raises `ReadingStopped`.
    is_halted: Callable[[], bool]
    lines_limit: int = LINES_LIMIT
    # Whether the base model's chat template must take every example.
    is_rendered: bool = False


@dataclass
class DatasetReading:
    """The counts and problems of a file; complete after its last line."""

    plan: Plan
    num_examples: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    blank_lines: int = 0
    had_byte_order_mark: bool = False
    has_instructions: bool = False
    # The first bytes, for suggestions on a file that is not JSON Lines.
    head: bytes = b""
    # The end of the first line without its line break.
    tail: bytes = b""
    # Whether the first line holds carriage returns, as where they alone end lines.
    has_lone_returns: bool = False
    other_names: set[str] = field(default_factory=set[str])
    # Number of examples with each field that nobody reads; "" stands for all that are not named.
    unused_fields: "Counter[str]" = field(default_factory=Counter[str])
    # Those of `OTHER_SHAPES` that refused lines have.
    other_shapes: set[str] = field(default_factory=set[str])
    # Examples in which the assistant says nothing and learns it.
    empty_answers: int = 0
    error_count: int = 0
    errors: list[LineProblem] = field(default_factory=list[LineProblem])
    warning_count: int = 0
    warnings: list[LineProblem] = field(default_factory=list[LineProblem])
    # Number of errors and warnings of each code.
    codes: "Counter[str]" = field(default_factory=Counter[str])

    def refuse(self, line: int | None, problem: ExampleProblem) -> None:
        """Count an error; the first thousand are listed."""
        self.error_count += 1
        self.codes[problem.code] += 1
        if len(self.errors) < REPORTED_PROBLEMS:
            self.errors.append(_problem(line, problem.field, problem.code, problem.message))

    def note(self, fields: Mapping[str, Any], messages: list[Message]) -> None:
        """Count the facts about a valid line that deserve a suggestion."""
        self.other_names.update(other_names(fields, self.plan.format))
        named: set[str] = set()
        for name in unused_fields(fields, self.plan.format):
            has_room = len(self.unused_fields) - ("" in self.unused_fields) < NAMED_FIELDS
            is_named = name in self.unused_fields or (has_room and NAME.fullmatch(name))
            named.add(name if is_named else "")
            if is_named:
                self.unused_fields[name] += 0  # the next field has less room
        self.unused_fields.update(named)
        self.empty_answers += any(
            message["role"] == "assistant"
            and not message["content"].strip()
            and "tool_calls" not in message
            and message.get("weight", 1) != 0
            for message in messages
        )

    def warn(self, warning: LineProblem) -> None:
        """Count a warning; the first thousand are listed."""
        self.warning_count += 1
        self.codes[warning.code] += 1
        if len(self.warnings) < REPORTED_PROBLEMS:
            self.warnings.append(warning)


def read_dataset(file: BinaryIO, size: int, plan: Plan) -> DatasetReading:
    """Check every line of a file of `size` bytes, read from its start. Raises `ReadingStopped`, `OSError`."""
    reading = DatasetReading(plan)
    seen = SeenExamples(min(plan.lines_limit, size // EXPECTED_LINE_BYTES))
    with ThreadPoolExecutor(1, "count") as counting:
        tally = _Tally(reading, counting)
        try:
            for batch in _batches(_examples(file, reading, seen)):
                if plan.is_halted():
                    raise ReadingStopped
                tally.add(batch)
            tally.finish()
        finally:
            seen.close()
    if reading.num_examples == 0 and reading.error_count == 0:
        reading.refuse(None, ExampleProblem("no_examples", None, "holds no example"))
    reading.warnings.sort(key=lambda one: one.line or 0)
    return reading


def _batches(examples: Iterator[ReadExample | None]) -> Iterator[list[ReadExample]]:
    """Group examples into batches of about `CHARACTERS_AT_ONCE` characters or `LINES_AT_ONCE` lines, whichever comes
    first.
    """
    batch: list[ReadExample] = []
    size = lines = 0
    for example in examples:
        lines += 1
        if example is not None:
            batch.append(example)
            size += sum(map(len, example.texts))
        if size >= CHARACTERS_AT_ONCE or lines >= LINES_AT_ONCE:
            yield batch
            batch, size, lines = [], 0, 0
    yield batch


def _examples(
    file: BinaryIO, reading: DatasetReading, seen: SeenExamples
) -> Iterator[ReadExample | None]:
    """Yield the example of each line, None for a line without one."""
    plan = reading.plan
    hints = TextHints(plan.base.tokenizer if plan.base else None)
    for number, line in _numbered(file, reading):
        if line.isspace() and len(line) <= LINE_LIMIT_BYTES:
            reading.blank_lines += 1
            yield None
            continue
        fields: Mapping[str, Any] = {}
        try:
            fields = decode_line(line)
            messages = parse_example(fields, plan.format)
            tools = tools_of(fields) if plan.format == "conversation" else []
            if plan.is_rendered and plan.base is not None:
                check_rendering(plan.base.text_format.template, messages, tools)
        except ExampleProblem as problem:
            reading.refuse(number, problem)
            # Such a line has user turns, only no answer.
            reading.has_instructions |= problem.code == "no_assistant"
            if problem.code == "missing_field":
                reading.other_shapes.update(name for name in OTHER_SHAPES if name in fields)
            yield None
            continue

        reading.note(fields, messages)
        listed = json.dumps(tools, ensure_ascii=False) if tools else ""
        example = ReadExample(number, messages, listed)
        for warning in hints.warnings(
            number, messages, lambda fields=fields: text_places(fields, plan.format), listed
        ):
            reading.warn(warning)
        if seen.add(messages, listed):
            message = "repeats an earlier example"
            reading.warn(_problem(number, None, "duplicate_example", message))
        yield example


def _problem(line: int | None, field: str | None, code: str, message: str) -> LineProblem:
    return LineProblem(line=line, field=field, code=code, message=message)


def _numbered(file: BinaryIO, reading: DatasetReading) -> Iterator[tuple[int, bytes]]:
    """Yield line numbers from 1 and lines; end where the rest of the file cannot be read."""
    for number, read in enumerate(lines_up_to(file, LINE_LIMIT_BYTES), 1):
        line = read
        if number == 1:
            reading.head = line[:64]
            first = line.rstrip(b"\r\n")
            reading.tail, reading.has_lone_returns = first[-64:], b"\r" in first
            if line.startswith(COMPRESSED):  # nothing is ever decompressed
                reading.refuse(None, ExampleProblem("compressed_file", None, "is compressed"))
                return
            if line.startswith(BYTE_ORDER_MARK):
                reading.had_byte_order_mark = True
                line = line[len(BYTE_ORDER_MARK) :] or b"\n"
        if number > reading.plan.lines_limit:
            text = f"has over {reading.plan.lines_limit} lines"
            reading.refuse(None, ExampleProblem("too_many_lines", None, text))
            return
        yield number, line


def first_object(file: BinaryIO) -> tuple[int, Mapping[str, Any]]:
    """The number and the fields of a file's first line that is a JSON object; without one, 1 and no field."""
    for number, line in _numbered(file, DatasetReading(Plan("instruction", None, lambda: False))):
        if not line.isspace():
            try:
                return number, decode_line(line)
            except ExampleProblem:
                continue
    return 1, {}


class _Tally:
    """Has batches counted in the second thread and adds up their tokens."""

    def __init__(self, reading: DatasetReading, counting: ThreadPoolExecutor) -> None:
        self._reading = reading
        self._counting = counting
        self._base = reading.plan.base
        self._counter = None if self._base is None else TokenCounter(self._base.tokenizer)
        self._in_flight: deque[tuple[list[ReadExample], Future[list[int]]]] = deque()
        self._overheads: dict[tuple[str, ...], int] = {}

    def add(self, batch: list[ReadExample]) -> None:
        """Begin to count a batch; wait where too many are in flight."""
        reading = self._reading
        reading.num_examples += len(batch)
        reading.has_instructions |= bool(batch)
        if self._counter is None or not batch:
            return
        texts = [text for example in batch for text in example.texts]
        self._in_flight.append((batch, self._counting.submit(self._counter.count, texts)))
        # A batch with very long texts is counted before the next one is read, which limits the memory.
        is_long = sum(map(len, texts)) > BATCHES_AHEAD * CHARACTERS_AT_ONCE
        while len(self._in_flight) > (0 if is_long else BATCHES_AHEAD):
            self._add_counts()

    def finish(self) -> None:
        """Wait for the batches in flight."""
        while self._in_flight:
            self._add_counts()

    def _add_counts(self) -> None:
        batch, future = self._in_flight.popleft()
        counts = iter(future.result())
        answers = whole = 0
        for example in batch:
            tokens = 0
            for message in example.messages:
                number = next(counts)
                tokens += number
                if message["role"] == "assistant":
                    answers += number
            tokens += next(counts) if example.tools else 0
            whole += tokens
            self._check_length(example, tokens)
        self._reading.response_tokens += answers
        self._reading.prompt_tokens += whole - answers

    def _check_length(self, example: ReadExample, tokens: int) -> None:
        base = self._base
        if base is None:
            return
        roles = tuple([message["role"] for message in example.messages])
        shape = (*roles, "tools") if example.tools else roles
        overhead = self._overheads.get(shape)
        if overhead is None:
            # Tokens that the chat template adds to turns of these roles; counted once, as most examples are alike.
            empty = [{"role": role, "content": ""} for role in roles]
            try:
                text = base.text_format.template.render(
                    empty, add_generation_prompt=False, tools=NO_TOOL if example.tools else None
                )
            except TemplateFailed:
                text = ""  # training reports it
            if len(self._overheads) > REPORTED_PROBLEMS:
                self._overheads.clear()
            overhead = len(encode(base.tokenizer, text))
            self._overheads[shape] = overhead
        if tokens + overhead > base.context_length:
            text = f"is longer than the context of {base.context_length} tokens and will be cut"
            self._reading.warn(_problem(example.line, None, "too_long", text))
