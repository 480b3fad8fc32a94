"""Docstrings can be read alone, and one name means one thing."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("tuneship", "flows", "tasks", "deployments")
ROOMS_AND_TESTS = (*ROOMS, "tests")
RIDDLES = re.compile(r"(Of|That|What|Whatever|Whose|Whoever|Where|In turn|Nothing)\b")
BANNED = re.compile(
    r"\b(anew|told|way back|roll-out|under way|in turn|hang up|hung up|taken away)\b", re.IGNORECASE
)
LONGEST_SUMMARY = 240


def sources(rooms: tuple[str, ...]) -> Iterator[tuple[Path, ast.Module]]:
    for room in rooms:
        for file in sorted((ROOT / room).rglob("*.py")):
            if "migrations" not in file.parts:
                yield file.relative_to(ROOT), ast.parse(file.read_text())


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the docstrings of modules, classes and functions, and the strings under an attribute."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for index, one in enumerate(body):
            is_text = isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
            follows = index == 0 or isinstance(body[index - 1], ast.Assign | ast.AnnAssign)
            if is_text and follows and isinstance(one.value.value, str):
                yield one.lineno, one.value.value


def test_every_docstring_is_a_sentence_that_can_be_read_alone() -> None:
    riddles = [
        f"{file}:{line} {text.splitlines()[0]}"
        for file, tree in sources(ROOMS_AND_TESTS)
        for line, text in docstrings(tree)
        if RIDDLES.match(text) or len(text.split("\n\n")[0]) > LONGEST_SUMMARY
    ]
    assert riddles == []


def test_no_docstring_uses_a_private_word() -> None:
    found = [
        f"{file}:{line} {word.group()}"
        for file, tree in sources(ROOMS_AND_TESTS)
        for line, text in docstrings(tree)
        for word in BANNED.finditer(text)
    ]
    assert found == []


def test_every_class_has_a_name_of_its_own() -> None:
    places = defaultdict[str, list[str]](list)
    for file, tree in sources(ROOMS):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(file))
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
