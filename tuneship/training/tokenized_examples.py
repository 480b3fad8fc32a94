"""JSONL examples become rows of tokens, with a mark on every token that is learnt.

The loss counts the assistant's words alone. Prompt and answer are tokenised apart, as generation
does it: the model answers after exactly the tokens it was trained on. Knows no model. Next:
`batches.py`.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tuneship.contract.dataset_lines import DatasetFormat, ExampleProblem, Message, parse_example
from tuneship.security.sealed_files import open_plain
from tuneship.template import PromptTemplate, TemplateFailed
from tuneship.training.progress_file import Reason, TrainingFailed

LINES_AT_ONCE = 512
# Without a validation set one example of so many is set aside.
VALIDATION_SHARE = 10


@dataclass(frozen=True)
class TokenizedExamples:
    """Tokenised examples, laid one after another: 5 bytes a token, whatever the number of rows."""

    tokens: NDArray[np.int32]
    learnt: NDArray[np.bool_]
    """As long as `tokens`: True where the loss counts."""
    starts: NDArray[np.int64]
    """Row i is `tokens[starts[i]:starts[i + 1]]`; one entry more than rows."""

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.starts) - 1

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row."""
        return np.diff(self.starts)

    def of(self, indices: NDArray[np.int64]) -> "TokenizedExamples":
        """A copy of these rows, in this order."""
        pieces = [slice(self.starts[index], self.starts[index + 1]) for index in indices]
        return TokenizedExamples(
            np.concatenate([self.tokens[piece] for piece in pieces]),
            np.concatenate([self.learnt[piece] for piece in pieces]),
            np.cumsum([0, *self.lengths[indices]]),
        )

    @property
    def all(self) -> NDArray[np.int64]:
        """The indices of all rows."""
        return np.arange(len(self))

    def targets(self, indices: NDArray[np.int64]) -> int:
        """Tokens of these rows that are predicted; nothing stands before a row's first one to predict it from."""
        return sum(
            int(np.count_nonzero(self.learnt[self.starts[index] + 1 : self.starts[index + 1]]))
            for index in indices
        )

    @cached_property
    def digests(self) -> list[bytes]:
        """Sixteen bytes for the content of each row."""
        return [
            hashlib.blake2b(
                self.tokens[a:b].tobytes() + self.learnt[a:b].tobytes(), digest_size=16
            ).digest()
            for a, b in pairwise(self.starts)
        ]


class Segment(NamedTuple):
    """A piece of an example's text: either all of it is learnt or none."""

    text: str
    learnt: bool


@dataclass(frozen=True)
class Encoder:
    """Turns examples into rows for one base model."""

    template: PromptTemplate
    tokenizer: Tokenizer
    context_length: int
    end_tokens: frozenset[int]
    """Tokens that end an answer; what the template writes after one is not learnt."""
    vocabulary: int
    """Tokens that the model knows: ids from 0 below it."""

    def encode(
        self, examples: Sequence[Sequence[Segment]]
    ) -> Iterator[tuple[list[int], list[bool]]]:
        """Tokens and marks of each example, not yet cut at the context length."""
        texts = [segment.text for example in examples for segment in example]
        encodings = iter(self.tokenizer.encode_batch(texts, add_special_tokens=False))
        for example in examples:
            tokens: list[int] = []
            learnt: list[bool] = []
            for segment in example:
                ids = next(encodings).ids
                counted = self._answer_length(ids) if segment.learnt else 0
                tokens += ids
                learnt += [True] * counted + [False] * (len(ids) - counted)
            yield tokens, learnt

    def _answer_length(self, ids: list[int]) -> int:
        """Up to the last end token, or all."""
        ends = (place + 1 for place in range(len(ids) - 1, -1, -1) if ids[place] in self.end_tokens)
        return next(ends, len(ids))


class ReadRows(NamedTuple):
    """Rows of a file, and what the context length did to them."""

    rows: TokenizedExamples
    truncated: int
    """Rows that lost their end."""
    dropped: int
    """Rows left out: the cut took everything that was to be learnt."""


def read_rows(
    path: Path, dataset_format: DatasetFormat, encoder: Encoder, key: str | None = None
) -> ReadRows:
    """Read a dataset file that the border has validated; `key` opens a sealed one.

    Raises TrainingFailed(data_unreadable) naming the line, never its text.
    """
    tokens, learnt, lengths = [], [], [0]
    truncated = dropped = 0
    examples = _read_segments(path, key, dataset_format, encoder.template)
    while chunk := list(islice(examples, LINES_AT_ONCE)):
        for ids, marks in encoder.encode(chunk):
            truncated += len(ids) > encoder.context_length
            kept = marks[: encoder.context_length]
            if not any(kept[1:]):
                dropped += 1
                continue
            tokens.append(np.array(ids[: encoder.context_length], dtype=np.int32))
            learnt.append(np.array(kept, dtype=np.bool_))
            lengths.append(len(kept))
    if not tokens:
        raise TrainingFailed(
            Reason.DATA_UNREADABLE,
            f"the {path.stem} file holds no example with anything to learn within the context "
            f"length of {encoder.context_length} tokens",
        )
    rows = TokenizedExamples(
        np.concatenate(tokens), np.concatenate(learnt), np.cumsum(lengths, dtype=np.int64)
    )
    if rows.tokens.max() >= encoder.vocabulary:
        raise TrainingFailed(
            Reason.INTERNAL,
            f"the base model cannot be used: its tokenizer makes tokens beyond the {encoder.vocabulary} "
            "that the model knows",
        )
    return ReadRows(rows, truncated, dropped)


def segments(messages: Sequence[Message], template: PromptTemplate) -> list[Segment]:
    """Cut the text of an example where the assistant's turns begin and end.

    The rest after the last learnt turn is left out: nothing follows from it. Raises TemplateFailed
    when the template writes earlier turns differently once later ones follow (some drop their
    reasoning): then no cut is right.
    """
    whole = template.render(messages, add_generation_prompt=False)
    result: list[Segment] = []
    position = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight", 1) == 0:
            continue
        before = template.render(messages[:number], add_generation_prompt=True)
        until = template.render(messages[: number + 1], add_generation_prompt=False)
        if not (until.startswith(before) and whole.startswith(until) and position <= len(before)):
            raise TemplateFailed(
                f"the chat template of the base model renders turn {number + 1} differently alone "
                "and within the conversation, so the learnt text cannot be told from the prompt"
            )
        result.append(Segment(whole[position : len(before)], learnt=False))
        result.append(Segment(whole[len(before) : len(until)], learnt=True))
        position = len(until)
    return result


def carve_out(rows: TokenizedExamples) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices for training and for validation when no validation set was given.

    Chosen by content, not by position or seed: the same examples are set aside for every job on the
    same data, and copies of one example fall on the same side but for those at the border.
    """
    order = np.array(sorted(range(len(rows)), key=rows.digests.__getitem__), dtype=np.int64)
    size = max(1, len(rows) // VALIDATION_SHARE)
    return np.sort(order[size:]), np.sort(order[:size])


def _read_segments(
    path: Path, key: str | None, dataset_format: DatasetFormat, template: PromptTemplate
) -> Iterator[list[Segment]]:
    try:
        with open_plain(path, key) as file:
            for number, line in _lines(file):
                try:
                    yield segments(parse_example(orjson.loads(line), dataset_format), template)
                except TemplateFailed as error:
                    raise _unreadable(path, f"line {number}: {error}") from error
                except ExampleProblem as error:
                    problem = f"{error.code} {error.field or ''}".strip()
                    raise _unreadable(path, f"line {number}: {problem}") from None
                except (ValueError, AttributeError, TypeError):
                    # The message of a JSON error quotes the line: only the place is told.
                    raise _unreadable(path, f"line {number}: invalid_json") from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Lines from 1 that are not blank; a byte order mark at the start is no part of the first."""
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if text.strip():
            yield number, text


def _unreadable(path: Path, problem: str) -> TrainingFailed:
    return TrainingFailed(Reason.DATA_UNREADABLE, f"{path.name}: {problem}")
