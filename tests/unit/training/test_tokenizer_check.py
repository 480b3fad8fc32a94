"""Tests of what counts as a difference between our reading of a model's texts and that of transformers."""

import json
from pathlib import Path

import pytest

from tests.support.zoo.template_kinds import CHATML, IM
from tests.support.zoo.tokenizer_kinds import BY_NAME as TOKENIZERS
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import load_tokenizer
from tuneship.training.examples.tokenizer_check import difference_from, load_as_transformers


@pytest.mark.parametrize(
    ("template", "difference"),
    [(CHATML, None), (CHATML + "{{ unk_token }}", "a conversation in the chat template")],
)
def test_a_special_token_that_transformers_adds_by_class_matters_where_the_template_writes_it(
    tmp_path: Path, template: str, difference: str | None
) -> None:
    TOKENIZERS["qwen2"].save(tmp_path, IM)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    (tmp_path / "chat_template.jinja").write_text(template)
    reference = load_as_transformers(tmp_path)
    assert reference.unk_token  # which no file names
    ours = ModelTextFormat.of_base(tmp_path, load_tokenizer(tmp_path))
    assert difference_from(reference, ours) == difference
