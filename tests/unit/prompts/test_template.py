"""Messages become the text that a model was trained on."""

import json
from pathlib import Path

import pytest

from tests.support.models.tiny_model import CHAT_TEMPLATE
from tuneship.prompts.template import (
    BUILT_IN_TEMPLATE,
    PromptTemplate,
    TemplateFailed,
)

TALK = [
    {"role": "user", "content": "colour?"},
    {"role": "assistant", "content": "red"},
]


def test_a_generation_prompt_ends_where_the_assistant_speaks() -> None:
    template = PromptTemplate(CHAT_TEMPLATE, {})
    assert (
        template.render(TALK[:1], add_generation_prompt=True)
        == "<|user|>colour?<|end|><|assistant|>"
    )
    whole = template.render(TALK, add_generation_prompt=False)
    assert whole == "<|user|>colour?<|end|><|assistant|>red<|end|>"


def test_a_model_without_a_template_gets_the_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    template = PromptTemplate.load(tmp_path)
    assert template.source == BUILT_IN_TEMPLATE
    assert (
        template.render(TALK, add_generation_prompt=False)
        == "User: colour?\n\nAssistant: red</s>\n\n"
    )


def test_a_template_inside_the_tokenizer_configuration_is_found(tmp_path: Path) -> None:
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    for value in ("yes", named):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        assert PromptTemplate.load(tmp_path).render([], add_generation_prompt=False) == "yes"


def test_a_saved_template_renders_the_same_without_the_tokenizer(tmp_path: Path) -> None:
    template = PromptTemplate(
        "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        {"bos_token": "<s>", "eos_token": "</s>"},
    )
    template.save(tmp_path)
    again = PromptTemplate.load(tmp_path)
    assert again.render(TALK, add_generation_prompt=False) == "<s>colour?</s>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no ' + messages[0].content) }}",
        "{{ messages[7].content + 1 }}",
    ],
)
def test_a_template_that_refuses_or_attacks_fails_without_quoting(source: str) -> None:
    template = PromptTemplate(source, {})
    with pytest.raises(TemplateFailed, match="in its line 1") as refusal:
        template.render(TALK, add_generation_prompt=False)
    assert "colour" not in str(refusal.value)


def test_a_reason_that_the_template_itself_words_is_shown() -> None:
    template = PromptTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateFailed, match="refuses these messages: roles must alternate"):
        template.render(TALK, add_generation_prompt=False)


def test_a_template_with_a_syntax_error_is_refused_when_it_is_read() -> None:
    with pytest.raises(TemplateFailed, match="TemplateSyntaxError"):
        PromptTemplate("{% if %}", {})


def test_a_generation_block_renders_as_its_body() -> None:
    template = PromptTemplate("a{% generation %}b{% endgeneration %}c", {})
    assert template.render([], add_generation_prompt=False) == "abc"
