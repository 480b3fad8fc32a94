"""Docstrings can be read alone, and one name means one thing."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("tuneship", "flows", "tasks", "deployments")
ROOMS_AND_TESTS = (*ROOMS, "tests")
RIDDLES = re.compile(r"(Of|That|What|Whatever|Whose|Whoever|Where|In turn|Nothing)\b")
BANNED = re.compile(
    r"\b(anew|told|way back|roll-out|under way|in turn|hang up|hung up|taken away)\b", re.IGNORECASE
)
LONGEST_SUMMARY = 240


@dataclass(frozen=True)
class Names:
    """Holds the docstrings by place, and by each name of a class in the rooms the files that define it."""

    docstrings: dict[str, str]
    classes: dict[str, list[str]]


@pytest.fixture(scope="module")
def names() -> Names:
    """Read every source file once."""
    found = Names({}, defaultdict(list))
    for file in (one for room in ROOMS_AND_TESTS for one in sorted((ROOT / room).rglob("*.py"))):
        if "migrations" in file.parts:
            continue
        place = file.relative_to(ROOT)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and place.parts[0] in ROOMS:
                found.classes[node.name].append(str(place))
            found.docstrings.update((f"{place}:{line}", text) for line, text in docstrings(node))
    return found


def docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstring of a module, class or function, and the strings under its attributes."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for index, one in enumerate(body):
        follows = index == 0 or isinstance(body[index - 1], ast.Assign | ast.AnnAssign)
        match one:
            case ast.Expr(value=ast.Constant(value=str(text))) if follows:
                yield one.lineno, text
            case _:
                pass


def test_every_docstring_is_a_sentence_that_can_be_read_alone(names: Names) -> None:
    riddles = [
        f"{place} {text.splitlines()[0]}"
        for place, text in names.docstrings.items()
        if RIDDLES.match(text) or len(text.split("\n\n")[0]) > LONGEST_SUMMARY
    ]
    assert riddles == []


def test_no_docstring_uses_a_private_word(names: Names) -> None:
    found = [
        f"{place} {word.group()}"
        for place, text in names.docstrings.items()
        for word in BANNED.finditer(text)
    ]
    assert found == []


def test_every_class_has_a_name_of_its_own(names: Names) -> None:
    assert {name: files for name, files in names.classes.items() if len(files) > 1} == {}
