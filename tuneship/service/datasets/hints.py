"""What is no error in a dataset and worth a look: examples that repeat, template markers, what may be patient data.

Warnings name line, field and code, never the text. The patterns for patient data are a hint: they find common
spellings and prove nothing about a file without a hit. Knows neither files nor tokens.
"""

import mmap
import re
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from tuneship.contract.dataset_lines import DatasetFormat, Message
from tuneship.contract.datasets import LineProblem
from tuneship.service.catalogues.base_models import special_texts

MARK_BITS = 32
EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}\.[A-Za-z]{2,}")
RECORD_NUMBER = re.compile(r"\bMRN\b\W{0,3}(?:is )?[0-9]{4,}")
SOCIAL_SECURITY = re.compile(r"(?<![0-9-])[0-9]{3}-[0-9]{2}-[0-9]{4}(?![0-9-])")
TELEPHONE = re.compile(
    r"(?<![0-9-])(?:\([0-9]{3}\) ?|[0-9]{3}[-. ])[0-9]{3}[-. ][0-9]{4}(?![0-9-])"
)
# Both numbers have this in them, and nearly every other text does not.
DIGITS = re.compile(r"[0-9]{2}[-. ][0-9]{4}")
INSTRUCTION_FIELDS = {"system": "system", "user": "instruction", "assistant": "response"}


class SeenExamples:
    """Whether an example stood before, in five bytes an example: 24 MiB for the five million of a big file.

    A slot holds 32 bits of the example's hash, its place about twenty more: among five million different examples one
    is taken for a repetition about once in a hundred files. Full tables stay, and a larger one follows.
    """

    def __init__(self, expected: int) -> None:
        """Room for about `expected` examples at first."""
        self._free = 0
        self._slots = max(1 << 10, expected * 5 // 4)
        self._memory: list[mmap.mmap] = []
        self._tables: list[memoryview[int]] = []

    def add(self, messages: Sequence[Message]) -> bool:
        """Whether the same turns were added before."""
        if self._free == 0:
            self._enlarge()
        known = hash(tuple([part for one in messages for part in (one["role"], one["content"])]))
        mark = (known & 0xFFFF_FFFF) or 1  # 0 is an empty slot
        place, table = 0, self._tables[0]
        for table in self._tables:
            slots = len(table)
            place = (known >> MARK_BITS) % slots
            while found := table[place]:
                if found == mark:
                    return True
                place = (place + 1) % slots
        table[place] = mark
        self._free -= 1
        return False

    def _enlarge(self) -> None:
        self._memory.append(mmap.mmap(-1, 4 * self._slots))  # untouched pages take no memory
        self._tables.append(memoryview(self._memory[-1]).cast("I"))
        self._free = self._slots * 4 // 5
        self._slots *= 2

    def close(self) -> None:
        """Give the memory back."""
        for table, memory in zip(self._tables, self._memory, strict=True):
            table.release()
            memory.close()


class TextHints:
    """Finds in texts what deserves a warning."""

    def __init__(self, dataset_format: DatasetFormat, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: whose special tokens are looked for."""
        self._format = dataset_format
        self._markers = None if tokenizer is None else special_texts(tokenizer)

    def warnings(self, line: int, messages: Sequence[Message]) -> Iterator[LineProblem]:
        """What is suspicious in one example."""
        for place, message in enumerate(messages):
            text = message["content"]
            if self._markers is not None and self._markers.search(text):
                reason = "holds a special token of the tokenizer as text"
                yield self._warning(line, place, message, "special_token", reason)
            for what in _suspicions(text):
                yield self._warning(line, place, message, "suspected_phi", f"may hold {what}")

    def _warning(
        self, line: int, place: int, message: Message, code: str, reason: str
    ) -> LineProblem:
        field = f"messages[{place}].content"
        if self._format == "instruction":
            field = INSTRUCTION_FIELDS[message["role"]]
        return LineProblem(line=line, field=field, code=code, message=reason)


def _suspicions(text: str) -> Iterator[str]:
    if "@" in text and EMAIL.search(text):
        yield "an e-mail address"
    if "MRN" in text and RECORD_NUMBER.search(text):
        yield "a medical record number"
    if DIGITS.search(text):
        if SOCIAL_SECURITY.search(text):
            yield "a social security number"
        if TELEPHONE.search(text):
            yield "a telephone number"
