"""Reads the dataset files of a job into tokenised rows, to learn from and to validate with.

Error messages name the file and the line, never its text. Next: `objective.py` (the rows of an example),
`training_loop.py`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tuneship.contract.common import count
from tuneship.contract.lines import strict_json
from tuneship.contract.lines.dataset_lines import DatasetFormat
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.prompts.template import PromptTemplate, TemplateFailed
from tuneship.security.sealed_files import open_plain
from tuneship.training.examples.batches import Indices
from tuneship.training.examples.tokenized_examples import Encoder, TokenizedExamples
from tuneship.training.objective import ExampleRows, Objective
from tuneship.training.progress_file import ProgressFile, Reason, TrainingFailed
from tuneship.training.spec import NO_KEYS, DataKeys, TrainingSpec

# The tokenizer's threads share the texts of so many examples.
EXAMPLES_PER_CALL = 512
# Without a validation file, one row of so many is set aside.
VALIDATION_SHARE = 10
# An error names this many lines, and counts the others.
NAMED_LINES = 5
JOINED = (
    "the tokenizer joins the beginning of an answer with the end of its prompt, so it would be asked for after other "
    "tokens than it is learnt after; most such answers begin with a line break or a space, which must go"
)


@dataclass(frozen=True)
class Data:
    """Rows to learn from and rows to validate with; the two may share one set of tokens."""

    training: TokenizedExamples
    training_indices: Indices
    validation: TokenizedExamples
    validation_indices: Indices
    # Whether an example has functions or calls of them.
    has_tools: bool = False

    def fingerprint(self, spec: TrainingSpec, *, of_26_12_0: bool = False) -> str:
        """A digest of everything that decides the course of the training.

        `of_26_12_0`: as that version computed it, with the whole path of the base model, which an upgrade may move.
        """
        base = spec.base_model if of_26_12_0 else Path(spec.base_model).name
        digest = hashlib.sha256(
            json.dumps(
                [
                    spec.base_digest or base,
                    spec.validation_frequency,
                    asdict(spec.hyperparameters),
                ]
            ).encode()
        )
        for rows in (self.training, self.validation):
            for array in (rows.tokens, rows.loss_mask, rows.starts):
                digest.update(array.tobytes())
        return digest.hexdigest()


class ReadRows(NamedTuple):
    """The rows of a file, and how many the context length cut."""

    rows: TokenizedExamples
    # Rows that lost their end.
    truncated: int
    # Rows left out, because the cut took all of their target tokens.
    dropped: int
    has_tools: bool = False


def read_data(
    spec: TrainingSpec,
    encoder: Encoder,
    objective: Objective,
    progress: ProgressFile,
    keys: DataKeys = NO_KEYS,
) -> Data:
    """Read both files; without a validation file some training rows are set aside.

    Raises TrainingFailed(data_unreadable), also for a single example that would have to serve as both.
    """

    def read(path: Path, key: str | None, name: str) -> ReadRows:
        result = read_rows(path, spec.dataset_format, encoder, objective, key)
        if result.truncated:
            progress.log(
                "warning",
                f"cut to the context length of {encoder.context_length} tokens: "
                f"{count(result.truncated, f'{name} example')}; dropped, since nothing was left to learn: "
                f"{result.dropped}",
            )
        return result

    training, _, _, has_tools = read(spec.training_file, keys.training, "training")
    if spec.validation_file is not None:
        read_too = read(spec.validation_file, keys.validation, "validation")
        validation, has_tools = read_too.rows, has_tools or read_too.has_tools
        return Data(training, training.all_indices, validation, validation.all_indices, has_tools)
    if len(training) < 2:
        raise TrainingFailed(
            Reason.DATA_UNREADABLE, "one example is too few to train on one and measure on another"
        )
    learnt, measured = carve_out(training)
    progress.log(
        "warning",
        f"no validation dataset: {len(measured)} of {len(training)} training examples are kept "
        "for validation",
    )
    return Data(training, learnt, training, measured, has_tools)


def carve_out(rows: TokenizedExamples) -> tuple[Indices, Indices]:
    """Indices for training and for validation when no validation file was given.

    Chosen by content, not by position or seed: the same examples are set aside for every job on the
    same data, and all copies of one example fall on the same side, except for the example at the cut.
    """
    order = np.array(sorted(range(len(rows)), key=rows.digests.__getitem__), dtype=np.int64)
    size = max(1, len(rows) // VALIDATION_SHARE)
    return np.sort(order[size:]), np.sort(order[:size])


def read_rows(
    path: Path,
    dataset_format: DatasetFormat,
    encoder: Encoder,
    objective: Objective,
    key: str | None = None,
) -> ReadRows:
    """Read a dataset file that the service has validated; `key` opens a sealed one.

    Raises TrainingFailed(data_unreadable) naming the line, never its text.
    """
    tokens, masks, starts = [], [], [0]
    truncated = dropped = 0
    has_tools = False
    joined: list[int] = []
    examples = _read_examples(path, key, dataset_format, encoder.template, objective)
    while chunk := list(islice(examples, EXAMPLES_PER_CALL)):
        encoded = iter(encoder.encode([row for _, example in chunk for row in example.rows]))
        for line, example in chunk:
            has_tools |= example.has_tools
            rows = list(islice(encoded, len(example.rows)))
            if not all(row.is_asked_alike for row in rows):
                joined.append(line)
                continue
            truncated += sum(len(row.tokens) > encoder.context_length for row in rows)
            # A method that compares the rows of an example needs all of them, so it loses all or none.
            if not all(any(row.loss_mask[1 : encoder.context_length]) for row in rows):
                dropped += len(rows)
                continue
            for row in rows:
                tokens.append(np.array(row.tokens[: encoder.context_length], dtype=np.int32))
                masks.append(np.array(row.loss_mask[: encoder.context_length], dtype=np.bool_))
                starts.append(starts[-1] + len(tokens[-1]))
    if joined:
        raise _unreadable(path, f"{_named_lines(joined)}: {JOINED}")
    if not tokens:
        raise TrainingFailed(
            Reason.DATA_UNREADABLE,
            f"the {path.stem} file holds no example with anything to learn within the context "
            f"length of {encoder.context_length} tokens",
        )
    tokenized = TokenizedExamples(
        np.concatenate(tokens), np.concatenate(masks), np.array(starts, dtype=np.int64)
    )
    if tokenized.tokens.max() >= encoder.vocabulary:
        raise TrainingFailed(
            Reason.INTERNAL,
            f"the base model cannot be used: its tokenizer makes tokens beyond the {encoder.vocabulary} "
            "that the model knows",
        )
    return ReadRows(tokenized, truncated, dropped, has_tools)


def _read_examples(
    path: Path,
    key: str | None,
    dataset_format: DatasetFormat,
    template: PromptTemplate,
    objective: Objective,
) -> Iterator[tuple[int, ExampleRows]]:
    """Each example of a file with its line; blank lines and a byte order mark are skipped."""
    try:
        with open_plain(path, key) as file:
            for number, line in enumerate(file, start=1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not text.strip():
                    continue
                try:
                    example = strict_json.parse(text, strict_json.MAXIMUM_VALUES_OF_LINE)
                    yield number, objective.rows(example, dataset_format, template)
                except TemplateFailed as error:
                    raise _unreadable(path, f"line {number}: {error}") from error
                except ExampleProblem as error:
                    problem = f"{error.code} {error.field or ''}".strip()
                    raise _unreadable(path, f"line {number}: {problem}") from None
                except (strict_json.JsonRefused, AttributeError, TypeError):
                    # Only the place is reported: the service has said more.
                    raise _unreadable(path, f"line {number}: invalid_json") from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error


def _named_lines(lines: Sequence[int]) -> str:
    """The first of these lines as numbers, and how many more there are."""
    named = ", ".join(map(str, lines[:NAMED_LINES]))
    more = len(lines) - NAMED_LINES
    return f"line{'s' * (len(lines) > 1)} {named}{f' and {more} more' if more > 0 else ''}"


def _unreadable(path: Path, problem: str) -> TrainingFailed:
    return TrainingFailed(Reason.DATA_UNREADABLE, f"{path.name}: {problem}")
