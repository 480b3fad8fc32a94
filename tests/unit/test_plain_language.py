"""Docstrings, comments, names and pages are in plain words; docstrings can be read alone; one name means one thing."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("tuneship", "flows", "tasks", "deployments")
ROOMS_AND_TESTS = (*ROOMS, "tests")
RIDDLES = re.compile(r"(Of|That|What|Whatever|Whose|Whoever|Where|In turn|Nothing)\b")
# "What cannot be read is refused" names no subject: "an unreadable file is refused" does.
TESTS_WITHOUT_A_SUBJECT = re.compile(r"test (of|that|what|whatever|whose|who|whoever|where)\b")
BANNED = re.compile(
    r"\b(anew|told|way back|roll-out|under way|in turn|hangs? up|hung up|taken away|second try"
    r"|shall|for so long|of our own|of one's own)\b",
    re.IGNORECASE,
)
# Words that users do not use: encrypted, expires, continues, unavailable, baseline and candidate, combined.
RETIRED = re.compile(
    r"\b((un)?sealed|laps(e|es|ed)|go(es)? on|(is|are|was|were) away|challengers?|both arms|either arm"
    r"|merged datasets?)\b",
    re.IGNORECASE,
)
COMMENT = re.compile(r"(?:^|\s)# .*")
# The name of a column of the database: versions of a rolling upgrade share it.
KEPT_NAMES = {"epochs_told"}
# Behind a number: "1 files" is not English.
PLURAL = re.compile(r" (?!characters|pass)[a-z]+s\b")
LONGEST_SUMMARY = 240


@dataclass(frozen=True)
class SourceTexts:
    """Holds the texts and names of all files by place, and for each class of the rooms the files that define it."""

    docstrings: dict[str, str]
    comments: dict[str, str]
    names: dict[str, str]
    classes: dict[str, list[str]]


@pytest.fixture(scope="module")
def texts() -> SourceTexts:
    """Read every source file once."""
    found = SourceTexts({}, {}, {}, defaultdict(list))
    for file in (one for room in ROOMS_AND_TESTS for one in sorted((ROOT / room).rglob("*.py"))):
        if "migrations" in file.parts:
            continue
        place, source = file.relative_to(ROOT), file.read_text()
        for number, line in enumerate(source.splitlines(), 1):
            if comment := COMMENT.search(line):
                found.comments[f"{place}:{number}"] = comment.group()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and place.parts[0] in ROOMS:
                found.classes[node.name].append(str(place))
            if (name := name_of(node)) and name not in KEPT_NAMES:
                found.names[f"{place}:{getattr(node, 'lineno', 0)} {name}"] = name.replace("_", " ")
            found.docstrings.update((f"{place}:{line}", text) for line, text in docstrings(node))
    return found


def name_of(node: ast.AST) -> str | None:
    """The name that a node gives to something, if it gives one."""
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()):
            return name
        case _:
            return None


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


def test_every_docstring_is_a_sentence_that_can_be_read_alone(texts: SourceTexts) -> None:
    riddles = [
        f"{place} {text.splitlines()[0]}"
        for place, text in texts.docstrings.items()
        if RIDDLES.match(text) or len(text.split("\n\n")[0]) > LONGEST_SUMMARY
    ]
    assert riddles == []


def test_no_docstring_comment_or_name_uses_a_private_word(texts: SourceTexts) -> None:
    found = [
        f"{place} {word.group()}"
        for kind in (texts.docstrings, texts.comments, texts.names)
        for place, text in kind.items()
        for word in BANNED.finditer(text)
    ]
    assert found == []


def test_the_name_of_every_test_begins_with_its_subject(texts: SourceTexts) -> None:
    tests = [name for name, text in texts.names.items() if TESTS_WITHOUT_A_SUBJECT.match(text)]
    assert tests == []


def test_no_page_of_the_documentation_uses_a_private_word() -> None:
    pages = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{page.relative_to(ROOT)} {word.group()}"
        for page in pages
        for word in BANNED.finditer(" ".join(page.read_text().split()))
    ]
    assert len(pages) > 80
    assert found == []


def test_no_page_for_users_uses_a_word_of_the_code() -> None:
    pages = [ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md")]
    pages += [
        page for room in ("migrating", "reference") for page in (ROOT / "docs" / room).glob("*.md")
    ]
    found = [
        f"{page.relative_to(ROOT)} {word.group()}"
        for page in pages
        # The glossary says what the words of the code mean.
        if page.name != "glossary.md"
        for word in RETIRED.finditer(" ".join(page.read_text().split()))
    ]
    assert len(pages) > 30
    assert found == []


def test_no_message_writes_a_plural_behind_a_number_that_may_be_one() -> None:
    found: list[str] = []
    for file in (one for room in ROOMS for one in sorted((ROOT / room).rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else []
            for number, text in pairwise(parts):
                match number, text:
                    case (
                        ast.FormattedValue(value=ast.Call(func=ast.Name(id="len"))),
                        ast.Constant(value=str(after)),
                    ) if PLURAL.match(after):
                        found.append(f"{file.relative_to(ROOT)}:{number.lineno}{after}")
                    case _:
                        pass
    assert found == [], "`count` of tuneship/contract/common.py writes `1 file` and `2 files`"


def test_every_class_has_a_name_of_its_own(texts: SourceTexts) -> None:
    assert {name: files for name, files in texts.classes.items() if len(files) > 1} == {}
