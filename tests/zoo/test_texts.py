"""A conversation that is learnt, and a prompt that is asked, have the tokens that transformers gives them."""

from pathlib import Path

import pytest

from tests.support.repeats import variants
from tests.support.zoo.cells import DIAGONAL
from tests.support.zoo.product import write_rows
from tests.support.zoo.template_kinds import KINDS as TEMPLATES
from tests.support.zoo.template_kinds import TemplateKind
from tests.support.zoo.texts import check_texts
from tests.support.zoo.tokenizer_kinds import KINDS as TOKENIZERS
from tests.support.zoo.tokenizer_kinds import TokenizerKind


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"))


@pytest.mark.parametrize(
    ("tokenizer", "template"),
    [pytest.param(*cell, id=f"{cell[0].name}-{cell[1].name}") for cell in DIAGONAL],
)
def test_a_base_is_tuned_and_served_by_the_tokens_of_transformers(
    tmp_path: Path, rows: Path, tokenizer: TokenizerKind, template: TemplateKind
) -> None:
    assert check_texts(tmp_path, rows, tokenizer, template).faults == ()


@pytest.mark.slow
@pytest.mark.parametrize("tokenizer", variants(TOKENIZERS, 6), ids=lambda kind: kind.name)
def test_a_tokenizer_does_so_with_every_template(
    tmp_path: Path, rows: Path, tokenizer: TokenizerKind
) -> None:
    faults = {
        template.name: found
        for number, template in enumerate(TEMPLATES)
        if (found := check_texts(tmp_path / str(number), rows, tokenizer, template).faults)
    }
    assert faults == {}
