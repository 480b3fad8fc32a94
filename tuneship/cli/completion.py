"""Shell completion: ids from the lists of the service, and words that the declarations name.

A service that does not answer within a moment, or refuses, completes nothing: a shell shows no errors.
"""

import io
import shlex
import sys
from collections.abc import Callable, Generator, MutableMapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from tuneship.cli.connection import for_completion
from tuneship.cli.declared import list_of
from tuneship.cli.fields import without_null
from tuneship.cli.output import entries_field, one_line

Words = list[tuple[str, str]]
# Fields that say what an id stands for.
TELLING = ("name", "model_name", "deployment_name", "status")


def completing(hint: Any) -> Callable[[str], Words]:
    """Completes ids of this type, or nothing where no list has such ids."""

    def complete(incomplete: str) -> Words:
        found: Words = []
        # Whatever is wrong, the shell goes on without words.
        with suppress(Exception):
            verb = list_of(without_null(hint))
            if verb is None:
                return []
            place = entries_field(verb.operation.hints["return"])
            if place is None:
                return []
            with for_completion() as client:
                page = client.call(verb.operation, limit=100)
            found = [
                (entry.id, ", ".join(one_line(getattr(entry, name)) for name in TELLING if hasattr(entry, name)))
                for entry in getattr(page, place[0])
                if entry.id.startswith(incomplete)
            ]  # fmt: skip
        return found

    return complete


@contextmanager
def words_for_bash(environment: MutableMapping[str, str]) -> Generator[None]:
    """Complete only the part after the last colon, because bash replaces no more of the word under the cursor."""
    kept = join_at_colons(environment)
    answer = io.StringIO()
    try:
        with redirect_stdout(answer):
            yield
    finally:
        sys.stdout.writelines(
            line.removeprefix(kept) for line in answer.getvalue().splitlines(True)
        )


def join_at_colons(environment: MutableMapping[str, str]) -> str:
    """Rejoin words that bash has split at colons, which ids of models contain.

    Returns the beginning of the word under the cursor that bash keeps.
    """
    kept = ""
    try:
        words, cursor = shlex.split(environment["COMP_WORDS"]), int(environment["COMP_CWORD"])
    except (KeyError, ValueError):
        return kept
    joined: list[str] = []
    place = cursor
    for number, word in enumerate(words):
        if number and ":" in (word, words[number - 1]):
            joined[-1] += word
            place -= number <= cursor
            if number == cursor:
                kept = joined[-1][: joined[-1].rindex(":") + 1]
        else:
            joined.append(word)
    environment["COMP_WORDS"], environment["COMP_CWORD"] = shlex.join(joined), str(place)
    return kept


def word_completion(words: Sequence[str]) -> Callable[[str], list[str]]:
    """Completes these words."""

    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete
