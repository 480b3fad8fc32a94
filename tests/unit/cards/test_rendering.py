"""A card as Markdown says what it lacks first, obeys no text, and its metadata are Hugging Face's."""

import json
import re
from datetime import timedelta
from html.parser import HTMLParser
from pathlib import Path

import jsonschema
import pytest
import yaml
from huggingface_hub import ModelCard as HubCard
from markdown_it import MarkdownIt

from tests.support.payloads import BREAKS, SCRIPTS
from tests.unit.cards.cards import NOON, card
from tuneship.cards.canonical import canonical, card_sha256
from tuneship.cards.making import new_card, with_release
from tuneship.cards.rendering import as_markdown
from tuneship.contract.model_card import CardModel, CardTraining, ModelCard, model_card_schema

SCHEMA = Path(__file__).parents[3] / "docs" / "model_card.schema.json"
# Texts that would begin a block of Markdown, or end the metadata.
BLOCKS = ("# head", "- item", "1. item", "> said", "---", "===", "    code", "```", "a: [1", '"}]')
# The most permissive renderer possible, which leaves tags unchanged.
RENDERER = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


class Page(HTMLParser):
    """Collects tags and addresses of a card as a browser would get it, without its metadata."""

    def __init__(self, markdown: str) -> None:
        super().__init__()
        self.tags, self.addresses = list[str](), list[tuple[str, str | None]]()
        self.feed(RENDERER.render(markdown.split("\n---\n", 1)[1]))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += attrs

    def handle_comment(self, data: str) -> None:
        self.tags.append("a comment")


def bare() -> ModelCard:
    return new_card(NOON, CardModel(name="chapters", base_model="tuneship-tiny"))


@pytest.mark.parametrize("text", [*SCRIPTS, *BLOCKS, *(f"a{sign}# b | c" for sign in BREAKS)])
def test_no_text_is_obeyed_in_markdown_nor_in_the_metadata(text: str) -> None:
    harmless, hostile = Page(as_markdown(card())), Page(as_markdown(card(text)))
    assert hostile.tags == harmless.tags
    assert hostile.addresses == harmless.addresses == []
    data = HubCard(as_markdown(card(text))).data
    assert (data.base_model, data.license) == (text, text)
    assert set(data.to_dict()) == set(HubCard(as_markdown(card())).data.to_dict())


def test_every_character_of_a_text_is_the_same_in_the_metadata() -> None:
    # Halves of a character are no text: no card has them.
    signs = [
        *range(0x180),
        *range(0x2000, 0x2070),
        0xFEFF,
        0xFFFD,
        0xFFFE,
        0xFFFF,
        0x1F600,
        0x10FFFF,
    ]
    text = "".join(f"a{chr(sign)}" for sign in signs)
    metadata = as_markdown(card(text)).split("\n---\n")[0].removeprefix("---\n")
    assert yaml.safe_load(metadata)["base_model"] == text
    assert len(metadata.splitlines()) == len(yaml.safe_load(metadata))


def test_the_metadata_have_the_scores_and_the_relation_to_the_base_model() -> None:
    data = HubCard(as_markdown(card())).data
    assert (data.base_model_relation, data.tags) == ("adapter", ["lora", "tuneship"])
    [result] = data.eval_results or []
    assert (result.task_type, result.dataset_type) == ("text-generation", "harmless")
    assert (result.metric_type, result.metric_value) == ("string_check", 0.593)


def test_the_first_words_say_how_complete_it_is_and_what_is_missing() -> None:
    text = as_markdown(bare())
    assert text.split("# chapters\n\n")[1].startswith(
        "**0 of 31 HTI-1 source attributes stated** (45 CFR 170.315(b)(11)(iv)(B)).\n\nMissing:\n"
    )
    assert "- 2 iii: intended users (`users`)" in text
    assert "- **users**: not stated" in text
    assert "There is no formal guarantee of privacy." in text
    assert "Missing:" not in as_markdown(card())


def test_slices_have_their_intervals_or_were_not_tested() -> None:
    whole = card("site")
    assert r"| site site | site | 410 | -0.4 \[-2.2, +1.4\] | no harm shown |" in as_markdown(whole)
    assert whole.evaluation is not None
    whole.evaluation.slices[0].verdict = "not_tested"
    assert "| not tested |" in as_markdown(whole)


def test_equal_cards_have_one_digest_and_it_stands_in_the_markdown() -> None:
    first, again = card("ä"), ModelCard.model_validate_json(canonical(card("ä")))
    assert canonical(first) == canonical(again)
    assert b"\n" not in canonical(first)
    assert json.loads(canonical(first))["statements"]["users"] == "ä"
    assert f"`{card_sha256(first)}`" in as_markdown(first)
    assert card_sha256(first) != card_sha256(card("a"))


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_not_known(loss: float) -> None:
    trained = CardTraining(
        job_id="ft_1",
        status="failed",
        method="lora",
        hyperparameters={},
        steps=4,
        training_loss=loss,
    )
    assert trained.training_loss is None


def test_cards_fit_the_published_schema() -> None:
    assert SCHEMA.read_text() == model_card_schema(), (
        "python -m tuneship.contract.model_card > docs/model_card.schema.json"
    )
    schema = json.loads(SCHEMA.read_text())
    for one in (bare(), card()):
        jsonschema.validate(json.loads(canonical(one)), schema)
    changed = json.loads(canonical(card())) | {"prompt": "text"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed, schema)


def test_the_card_of_a_release_keeps_its_findings_and_takes_the_origin_that_is_known_now() -> None:
    later = NOON + timedelta(days=1)
    here = new_card(
        later, CardModel(name="m", base_model="b", base_sha256={"model.safetensors": "0" * 64})
    )
    both = with_release(here, card())
    assert both.model.base_sha256
    assert (both.made_at, both.data) == (later, [])
    assert both.decisions == card().decisions
    assert both.completeness == card().completeness


def test_every_section_of_an_empty_card_says_that_nothing_is_known() -> None:
    text = as_markdown(bare())
    sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert sections == [
        "Model",
        "Use",
        "Warnings",
        "Data",
        "Training",
        "Fairness",
        "Evaluation",
        "Rollout",
        "Privacy",
        "Decisions",
        "Maintenance",
    ]
    assert "not known here" in text
    assert "not evaluated" in text
