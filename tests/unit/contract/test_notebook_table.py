"""Notebooks show replies as small tables in which no text takes effect."""

from html.parser import HTMLParser

import pytest

from tests.support.payloads import SCRIPTS
from tuneship.contract.datasets import EXAMPLE_DATASET, DatasetCreated, DatasetPage, DatasetSummary


class Reader(HTMLParser):
    """The tags and the texts of a piece of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.texts = set[str](), list[str]()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert attrs == []
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_a_reply_is_a_table_of_its_fields() -> None:
    html = DatasetCreated.model_validate(EXAMPLE_DATASET)._repr_html_()
    read = Reader(html)
    assert read.tags == {"table", "caption", "tr", "th", "td"}
    assert read.texts[0] == "DatasetCreated"
    assert read.texts[3:5] == ["name", "icd chapters"]
    assert "source_datasets" not in read.texts, "without a value"


@pytest.mark.parametrize("text", SCRIPTS)
def test_no_text_takes_effect(text: str) -> None:
    fields = {**EXAMPLE_DATASET, "name": text, "tags": {text: text}}
    dataset = DatasetCreated.model_validate(fields)
    page = {
        "datasets": [fields],
        "pagination": {"total": 1, "limit": 1, "offset": 0, "next_offset": None},
    }
    for reply in (dataset, DatasetPage.model_validate(page)):
        read = Reader(reply._repr_html_())
        assert read.tags <= {"table", "caption", "tr", "th", "td"}
        assert text in read.texts


def test_a_page_is_a_table_with_a_row_for_each_entry_and_long_ones_are_cut() -> None:
    long = {**EXAMPLE_DATASET, "tags": {"note": "x" * 500}}
    page = DatasetPage.model_construct(
        datasets=[DatasetSummary.model_validate(long) for _ in range(23)], pagination=None
    )
    read = Reader(page._repr_html_())
    assert read.texts.count("icd chapters") == 20
    assert "and 3 more" in read.texts
    assert max(len(text) for text in read.texts) == 200
