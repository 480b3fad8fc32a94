"""Reads a JSON Lines file once, line by line: the one reader and the one verdict of upload, validate and merge.

Parsing and counting overlap: batches of lines are tokenised in a thread beside. Memory stays below 64 MiB for any
file: blocks, two batches, 1,000 problems and 4 bytes for each line that may repeat an earlier one. Knows no HTTP and
no database. Next: `hints.py` (warnings), `advice.py` (suggestions), `token_counting.py`.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import BinaryIO

from tuneship.contract.dataset_lines import (
    DatasetFormat,
    ExampleProblem,
    Message,
    decode_line,
    other_names,
    parse_example,
)
from tuneship.contract.datasets import LineProblem
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.datasets.hints import SeenExamples, TextHints
from tuneship.service.datasets.token_counting import AT_ONCE, TokenCounter
from tuneship.template import TemplateFailed

FILE_LIMIT = 2 << 30
LINE_LIMIT = 8 << 20
LINES_LIMIT = 5_000_000
# Errors, and warnings, that are named; all are counted.
REPORTED = 1000
# Batches under way in the counting thread.
AHEAD = 2
# Lines in a batch at most: a parsed line takes about a kilobyte, however short it is.
LINES_AT_ONCE = 2048
# Bytes; the memory for repetitions grows when lines are shorter.
EXPECTED_LINE = 256
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
COMPRESSED = (b"\x1f\x8b", b"PK\x03\x04", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")

# Line and turns.
Example = tuple[int, list[Message]]


class ReadingStopped(Exception):
    """The service ends; the file has to be read again."""


@dataclass(frozen=True)
class Plan:
    """How a file is to be read."""

    format: DatasetFormat
    base: CataloguedModel | None
    """Whose tokenizer counts; None: nothing is counted but examples and repetitions."""
    is_halted: Callable[[], bool]
    """Looked at between batches; True raises `ReadingStopped`."""


@dataclass
class DatasetReading:
    """What is known of a file after its last line."""

    plan: Plan
    num_examples: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    blank_lines: int = 0
    had_byte_order_mark: bool = False
    has_instructions: bool = False
    head: bytes = b""
    """The first bytes, for advice on a file of another kind."""
    other_names: set[str] = field(default_factory=set[str])
    error_count: int = 0
    errors: list[LineProblem] = field(default_factory=list[LineProblem])
    warning_count: int = 0
    warnings: list[LineProblem] = field(default_factory=list[LineProblem])
    codes: "Counter[str]" = field(default_factory=Counter[str])
    """How many errors and warnings of each code."""

    def refuse(self, line: int | None, problem: ExampleProblem) -> None:
        """Count an error; the first thousand are named."""
        self.error_count += 1
        self.codes[problem.code] += 1
        if len(self.errors) < REPORTED:
            self.errors.append(_problem(line, problem.field, problem.code, problem.message))

    def warn(self, warning: LineProblem) -> None:
        """Count a warning; the first thousand are named."""
        self.warning_count += 1
        self.codes[warning.code] += 1
        if len(self.warnings) < REPORTED:
            self.warnings.append(warning)


def read_dataset(file: BinaryIO, size: int, plan: Plan) -> DatasetReading:
    """Check every line of a file of `size` bytes, which is at its start. Raises `ReadingStopped`, `OSError`."""
    reading = DatasetReading(plan)
    seen = SeenExamples(min(LINES_LIMIT, size // EXPECTED_LINE))
    with ThreadPoolExecutor(1, "count") as beside:
        tally = _Tally(reading, beside)
        try:
            for batch in _batches(_examples(file, reading, seen)):
                if plan.is_halted():
                    raise ReadingStopped
                tally.add(batch)
            tally.finish()
        finally:
            seen.close()
    if reading.num_examples == 0 and reading.error_count == 0:
        reading.refuse(None, ExampleProblem("no_examples", None, "the file holds no example"))
    reading.warnings.sort(key=lambda one: one.line or 0)
    return reading


def _batches(examples: Iterator[Example | None]) -> Iterator[list[Example]]:
    """Examples of about `AT_ONCE` characters together, or what came of `LINES_AT_ONCE` lines."""
    batch: list[Example] = []
    size = lines = 0
    for example in examples:
        lines += 1
        if example is not None:
            batch.append(example)
            size += sum(len(message["content"]) for message in example[1])
        if size >= AT_ONCE or lines >= LINES_AT_ONCE:
            yield batch
            batch, size, lines = [], 0, 0
    yield batch


def _examples(
    file: BinaryIO, reading: DatasetReading, seen: SeenExamples
) -> Iterator[Example | None]:
    """The example of each line; None for a line without one."""
    plan = reading.plan
    hints = TextHints(plan.format, plan.base.tokenizer if plan.base else None)
    for number, line in _numbered(file, reading):
        example = _example(number, line, reading)
        if example is not None:
            for warning in hints.warnings(number, example):
                reading.warn(warning)
            if seen.add(example):
                message = "repeats an earlier example"
                reading.warn(_problem(number, None, "duplicate_example", message))
        yield None if example is None else (number, example)


def _problem(line: int | None, field: str | None, code: str, message: str) -> LineProblem:
    return LineProblem(line=line, field=field, code=code, message=message)


def _example(number: int, line: bytes, reading: DatasetReading) -> list[Message] | None:
    if line.isspace():
        reading.blank_lines += 1
        return None
    try:
        fields = decode_line(line)
        example = parse_example(fields, reading.plan.format)
    except ExampleProblem as problem:
        reading.refuse(number, problem)
        reading.has_instructions |= problem.code == "no_assistant"  # the user's turns came first
        return None
    reading.other_names.update(other_names(fields, reading.plan.format))
    return example


def _numbered(file: BinaryIO, reading: DatasetReading) -> Iterator[tuple[int, bytes]]:
    """Physical lines from 1, without line ends; ends at what makes the rest unreadable."""
    number = 0
    while line := file.readline(LINE_LIMIT + 2):
        number += 1
        if number == 1:
            line = _first_line(line, reading)
            if line is None:
                return
        if number > LINES_LIMIT:
            text = f"has over {LINES_LIMIT} lines"
            reading.refuse(None, ExampleProblem("too_many_lines", None, text))
            return
        if len(line) > LINE_LIMIT and len(line.rstrip(b"\r\n")) > LINE_LIMIT:
            reading.refuse(number, ExampleProblem("line_too_long", None, "is longer than 8 MiB"))
            while line and not line.endswith(b"\n"):
                line = file.readline(1 << 16)
            continue
        yield number, line


def _first_line(line: bytes, reading: DatasetReading) -> bytes | None:
    """Without a byte order mark; None when the file is compressed: nothing is ever inflated."""
    reading.head = line[:64]
    if line.startswith(COMPRESSED):
        reading.refuse(None, ExampleProblem("compressed_file", None, "is compressed"))
        return None
    if line.startswith(BYTE_ORDER_MARK):
        reading.had_byte_order_mark = True
        return line[len(BYTE_ORDER_MARK) :] or b"\n"
    return line


class _Tally:
    """Counts batches in the thread beside, and adds up what comes back."""

    def __init__(self, reading: DatasetReading, beside: ThreadPoolExecutor) -> None:
        self._reading = reading
        self._beside = beside
        self._base = reading.plan.base
        self._counter = None if self._base is None else TokenCounter(self._base.tokenizer)
        self._under_way: deque[tuple[list[Example], Future[list[int]]]] = deque()
        self._overheads: dict[tuple[str, ...], int] = {}

    def add(self, batch: list[Example]) -> None:
        reading = self._reading
        reading.num_examples += len(batch)
        reading.has_instructions |= bool(batch)
        if self._counter is None or not batch:
            return
        texts = [message["content"] for _, messages in batch for message in messages]
        self._under_way.append((batch, self._beside.submit(self._counter.count, texts)))
        is_long = sum(map(len, texts)) > AHEAD * AT_ONCE
        while len(self._under_way) > (0 if is_long else AHEAD):
            self._settle()

    def finish(self) -> None:
        while self._under_way:
            self._settle()

    def _settle(self) -> None:
        batch, future = self._under_way.popleft()
        counts = iter(future.result())
        answers = whole = 0
        for line, messages in batch:
            tokens = 0
            for message in messages:
                number = next(counts)
                tokens += number
                if message["role"] == "assistant":
                    answers += number
            whole += tokens
            self._check_length(line, messages, tokens)
        self._reading.response_tokens += answers
        self._reading.prompt_tokens += whole - answers

    def _check_length(self, line: int, messages: list[Message], tokens: int) -> None:
        base = self._base
        if base is None:
            return
        roles = tuple([message["role"] for message in messages])
        overhead = self._overheads.get(roles)
        if overhead is None:
            overhead = self._overhead(base, roles)
        if tokens + overhead > base.context_length:
            text = f"is longer than the context of {base.context_length} tokens and will be cut"
            self._reading.warn(_problem(line, None, "too_long", text))

    def _overhead(self, base: CataloguedModel, roles: tuple[str, ...]) -> int:
        """Tokens that the chat template adds to turns of these roles."""
        empty = [{"role": role, "content": ""} for role in roles]
        try:
            text = base.template.render(empty, add_generation_prompt=False)
        except TemplateFailed:
            text = ""  # training will say so
        if len(self._overheads) > REPORTED:
            self._overheads.clear()
        overhead = len(base.tokenizer.encode(text, add_special_tokens=False))
        self._overheads[roles] = overhead
        return overhead
