"""Warnings about a dataset without errors: repeated examples, special tokens, text that may be patient data.

Warnings name line, field and code, never the text. The patterns for patient data are a hint: they find common
spellings and prove nothing about a file without a hit. Knows neither files nor tokens.
"""

import mmap
import re
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer

from tuneship.contract.datasets import LineProblem
from tuneship.contract.lines.dataset_lines import Message, text_of
from tuneship.prompts.text_tokenizer import special_texts

MARK_BITS = 32
EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}\.[A-Za-z]{2,}")
RECORD_NUMBER = re.compile(r"\bMRN\b\W{0,3}(?:is )?[0-9]{4,}")
SOCIAL_SECURITY = re.compile(r"(?<![0-9-])[0-9]{3}-[0-9]{2}-[0-9]{4}(?![0-9-])")
TELEPHONE = re.compile(
    r"(?<![0-9-])(?:\([0-9]{3}\) ?|[0-9]{3}[-. ])[0-9]{3}[-. ][0-9]{4}(?![0-9-])"
)
# Contained in both kinds of numbers and in hardly any other text, so most texts need one search.
NUMBER_PART = re.compile(r"[0-9]{2}[-. ][0-9]{4}")


class SeenExamples:
    """A set of examples in five bytes each: 24 MiB for the five million of a big file.

    An entry holds 32 bits of the example's hash, and its index stands for about twenty more: among five million
    different examples one is taken for a repetition about once in a hundred files. Full tables stay, and a larger one
    is added.
    """

    def __init__(self, expected: int) -> None:
        """Make room for about `expected` examples at first."""
        self._free = 0
        self._entries = max(1 << 10, expected * 5 // 4)
        self._memory: list[mmap.mmap] = []
        self._tables: list[memoryview[int]] = []

    def add(self, messages: Sequence[Message], tools: str = "") -> bool:
        """Add an example; return whether the same turns with the same functions were added before."""
        if self._free == 0:
            self._memory.append(mmap.mmap(-1, 4 * self._entries))  # untouched pages take no memory
            self._tables.append(memoryview(self._memory[-1]).cast("I"))
            self._free = self._entries * 4 // 5
            self._entries *= 2

        # Open addressing with linear probing.
        parts = [part for one in messages for part in (one["role"], text_of(one))]
        example = hash((*parts, tools))
        mark = (example & 0xFFFF_FFFF) or 1  # 0 is an empty entry
        index, table = 0, self._tables[0]
        for table in self._tables:
            entries = len(table)
            index = (example >> MARK_BITS) % entries
            while entry := table[index]:
                if entry == mark:
                    return True
                index = (index + 1) % entries
        table[index] = mark
        self._free -= 1
        return False

    def close(self) -> None:
        """Free the memory."""
        for table, memory in zip(self._tables, self._memory, strict=True):
            table.release()
            memory.close()


class TextHints:
    """Finds special tokens and possible patient data in texts."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """`tokenizer`: its special tokens are searched for; None: no search."""
        self._markers = None if tokenizer is None else special_texts(tokenizer)

    def warnings(
        self,
        line: int,
        messages: Sequence[Message],
        places: Callable[[], Sequence[str]],
        tools: str = "",
    ) -> Iterator[LineProblem]:
        """Yield a warning for each special token and each suspicion in one example.

        `places` finds the field of each turn's text, which few examples need.
        """
        fields: Sequence[str] = ()
        for index, message in enumerate(messages):
            content = message["content"]
            for code, reason in self._reasons(content):
                fields = fields or places()
                yield _warning(line, fields[index], code, reason)
            for code, reason in self._reasons(text_of(message)[len(content) :]):
                fields = fields or places()
                turn = fields[index].rpartition(".")[0]
                yield _warning(line, f"{turn}.tool_calls", code, reason)
        for code, reason in self._reasons(tools):
            yield _warning(line, "tools", code, reason)

    def _reasons(self, text: str) -> Iterator[tuple[str, str]]:
        if self._markers is not None and self._markers.search(text):
            yield "special_token", "holds a special token of the tokenizer as text"
        for suspicion in _suspicions(text):
            yield "suspected_phi", f"may hold {suspicion}"


def _warning(line: int, field: str, code: str, reason: str) -> LineProblem:
    return LineProblem(line=line, field=field, code=code, message=reason)


def _suspicions(text: str) -> Iterator[str]:
    # A substring test costs far less than a pattern.
    if "@" in text and EMAIL.search(text):
        yield "an e-mail address"
    if "MRN" in text and RECORD_NUMBER.search(text):
        yield "a medical record number"
    if NUMBER_PART.search(text):
        if SOCIAL_SECURITY.search(text):
            yield "a social security number"
        if TELEPHONE.search(text):
            yield "a telephone number"
