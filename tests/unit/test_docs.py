"""The documents name files that exist, and their links lead to files."""

import re
from pathlib import Path

from scripts import reference

ROOT = Path(__file__).parents[2]
DOCS = {doc: doc.read_text() for doc in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"))}
PATH = re.compile(
    r"(?<![\w./~<>-])(?:(?:benchmarks|deployments|docs|examples|flows|scripts|tasks|tests|tuneship)/[\w./-]*|[\w./-]+\.py\b)"
)
NAMES = {file.name for room in ("tests", "tuneship") for file in (ROOT / room).rglob("*.py")}
# Code to do, from the file that its first line names to the next blank line.
EXCERPT = re.compile(r"# do: (\S+\.py)\b[^\n]*\n(.*?)(?=\n\n# don't|```)", re.DOTALL)
LINK = re.compile(r"\]\((?!\w+:|#)([^)#]+)")


def test_every_path_in_backticks_exists() -> None:
    spans = [(doc, span) for doc in DOCS for span in re.findall(r"`([^`\n]+)`", DOCS[doc])]
    named = {(doc.name, path) for doc, span in spans for path in PATH.findall(span)}
    assert {("architecture.md", "tests/support/"), ("glossary.md", "tuneship/contract/")} <= named
    lost = {(doc, path) for doc, path in named if path not in NAMES and not (ROOT / path).exists()}
    assert lost == set()


def test_every_relative_link_leads_to_a_file() -> None:
    links = [(doc, link) for doc, text in DOCS.items() for link in LINK.findall(text)]
    assert links
    assert [(doc.name, link) for doc, link in links if not (doc.parent / link).exists()] == []


def test_every_decision_is_in_the_list_of_decisions() -> None:
    room = ROOT / "docs" / "decisions"
    listed = LINK.findall(DOCS[room / "README.md"])
    assert {file.name for file in room.glob("[0-9]*.md")} - {*listed} == set()


def test_code_to_do_stands_in_the_file_that_it_names() -> None:
    excerpts = [found for text in DOCS.values() for found in EXCERPT.findall(text)]
    assert len(excerpts) >= 10
    lost = [
        (file, line)
        for file, code in excerpts
        for line in map(str.strip, code.splitlines())
        if line not in map(str.strip, (ROOT / file).read_text().splitlines())
    ]
    assert lost == []


def test_the_reference_is_that_of_the_code() -> None:
    written = {file.name: file.read_text() for file in reference.FOLDER.glob("*.md")}
    assert written == reference.pages(), "run: python scripts/reference.py"


def test_every_setting_has_a_meaning() -> None:
    rows = [line for line in reference.pages()["settings.md"].splitlines() if line[:3] == "| `"]
    assert len(rows) > 80
    assert [row for row in rows if row.endswith("|  |")] == []
