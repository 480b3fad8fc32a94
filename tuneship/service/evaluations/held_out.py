"""Reads the examples of an evaluation out of its dataset, and finds those that a model was trained on."""

import hashlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from tuneship.contract.errors import DatasetError, ErrorDetail, ValidationFailed
from tuneship.contract.evaluations import EvaluationSettings
from tuneship.contract.lines.dataset_lines import (
    DatasetFormat,
    Message,
    decode_line,
    parse_example,
)
from tuneship.contract.lines.example_problem import ExampleProblem
from tuneship.contract.lines.reading_lines import numbered
from tuneship.evaluation.items import EvaluationItem, MetadataRefused, read_item
from tuneship.evaluation.leaks import leaked_lines
from tuneship.evaluation.scoring import HeldOutExample, held_out_examples
from tuneship.evaluation.selection import select
from tuneship.security.sealed_files import ObjectDamaged, open_plain
from tuneship.service.access.data_keys import Keyring
from tuneship.service.answers.field_errors import field_error
from tuneship.service.datasets.lookup import object_of
from tuneship.service.models.lookup import TUNED, job_of
from tuneship.store.database import rows, tables
from tuneship.store.database.database import Database
from tuneship.store.database.tables import DatasetRow
from tuneship.store.files.blobs import Blobs
from tuneship.store.files.stored_files import dataset_file

# The selected examples are in memory while they are evaluated.
MAXIMUM_CHARACTERS = 256 << 20


@dataclass(frozen=True)
class HeldOutReader:
    """Reads datasets."""

    database: Database
    blobs: Blobs
    keyring: Keyring
    # Set when the service ends.
    halted: threading.Event

    def read(
        self, dataset: DatasetRow, settings: EvaluationSettings
    ) -> tuple[list[HeldOutExample], str]:
        """Read the selected examples in their random order, and the SHA-256 of the whole file.

        Raises `ValidationFailed` and `DatasetError`.
        """
        chosen = select(dataset["num_examples"], settings.max_examples, settings.seed)
        wanted, found = set(chosen), dict[int, tuple[int, EvaluationItem]]()
        characters, digest = 0, hashlib.sha256()
        with self._opened(dataset) as file:
            for position, (line, content) in enumerate(numbered(_hashed(file, digest))):
                if position not in wanted:
                    continue
                characters += len(content)
                if characters > MAXIMUM_CHARACTERS:
                    text = "selects more than 256 MiB of examples"
                    raise field_error("max_examples", text, "out_of_range")
                found[position] = line, read_item(content, dataset["format"])
        picked = [found[position] for position in chosen]
        try:
            examples = held_out_examples(picked, settings)
        except MetadataRefused as error:
            line = None if error.example is None else picked[error.example][0]
            detail = ErrorDetail(error.field, error.code, error.message, line=line)
            text = f"{error.field} {error.message}" + ("" if line is None else f" (line {line})")
            raise ValidationFailed(text, param=error.field, details=[detail]) from None
        return examples, digest.hexdigest()

    def leaks(
        self,
        client_id: str,
        models: Sequence[str],
        examples: Sequence[HeldOutExample],
        is_ended: Callable[[], bool],
    ) -> tuple[list[int], bool]:
        """The lines of the examples that a model was trained on, and whether all training data could be looked through.

        The data of an imported model are not known, and neither are those of a deleted dataset.
        """

        def is_over() -> bool:
            return self.halted.is_set() or is_ended()

        items = {one.line: one.item for one in examples}
        found, is_complete = set[int](), True
        datasets: dict[str, DatasetRow] = {}
        with self.database.read() as connection:
            for model in models:
                if not model.startswith(TUNED):
                    continue
                job = job_of(connection, client_id, model)
                dataset = job and rows.fetch(
                    connection, tables.datasets, job["dataset_id"], client_id=client_id
                )
                if dataset:
                    datasets[dataset["id"]] = dataset
                else:
                    is_complete = False
        for dataset in datasets.values():
            try:
                with self._opened(dataset) as file:
                    training = _conversations(file, dataset["format"], is_over)
                    found |= leaked_lines(items, training)
            except DatasetError:  # deleted since its row was read
                is_complete = False
        return sorted(found), is_complete

    @contextmanager
    def _opened(self, dataset: DatasetRow) -> Generator[BinaryIO]:
        """Open the plain bytes of a dataset. Raises `DatasetError` for one that is gone or damaged, and `BlobsAway`."""
        with self.database.read() as connection:
            key = self.keyring.find(connection, dataset["client_id"], object_of(dataset))
        try:
            with (
                dataset_file(self.blobs, dataset, is_checked=True) as path,
                open_plain(path, key) as file,
            ):
                yield file
        except (FileNotFoundError, ObjectDamaged):
            text = "the stored dataset is damaged or missing"
            raise DatasetError(text, param="dataset_id", status=409) from None


def _hashed(file: BinaryIO, digest: Any) -> Iterator[bytes]:
    for line in file:
        digest.update(line)
        yield line


class LeaksHalted(Exception):
    """The service shuts down, or the evaluation has ended: whoever goes on begins again."""


def _conversations(
    file: BinaryIO, dataset_format: DatasetFormat, is_over: Callable[[], bool]
) -> Iterator[Sequence[Message]]:
    for _, line in numbered(file):
        if is_over():
            raise LeaksHalted
        try:
            yield parse_example(decode_line(line), dataset_format)
        except ExampleProblem:  # its upload was refused, or a later rule refuses it
            continue
