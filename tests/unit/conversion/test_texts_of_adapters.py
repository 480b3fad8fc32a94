"""An adapter from elsewhere is asked in the template of its training, by the tokens of its base model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tuneship.conversion.trained_tokenizer import check_tokenizer
from tuneship.service.catalogues.base_models import SHIPPED
from tuneship.service.models.received_adapter import settle_template
from tuneship.serving.adapters import AdapterRefused
from tuneship.template import PromptTemplate

TALK = [{"role": "user", "content": "Chronic eczema"}, {"role": "assistant", "content": "L20"}]
SOURCE = "{{ bos_token }}{%- for m in messages %}{{ m['content'] + eos_token }}{% endfor %}"
OTHER = "{{ bos_token }}{%- for m in messages %}{{ '-' + m['content'] + eos_token }}{% endfor %}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = shutil.copytree(SHIPPED / "tuneship-tiny", tmp_path / "base")
    change(folder / "tokenizer_config.json", bos_token="<|system|>")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    for name in ("adapter", "tokenizer"):
        (tmp_path / name).mkdir()
    return tmp_path / "adapter"


def change(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **fields}))


def settled(base: Path, adapter: Path) -> PromptTemplate:
    own = PromptTemplate.load(base)
    settle_template(adapter, base, own, adapter.with_name("tokenizer"))
    left = {file.name for file in adapter.iterdir()}
    assert left == {"chat_template.jinja", "special_tokens_map.json"}
    return PromptTemplate.load(adapter)


def as_in_transformers(folder: Path, source: str | None = None) -> str:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(TALK, chat_template=source, tokenize=False)


@pytest.mark.parametrize("place", ["file", "setting", "list", "part of the tokens"])
def test_a_template_without_its_tokens_has_those_of_the_base_model(
    base: Path, adapter: Path, place: str
) -> None:
    if place in ("file", "part of the tokens"):
        (adapter / "chat_template.jinja").write_text(SOURCE)
    if place == "part of the tokens":
        change(adapter / "special_tokens_map.json", eos_token={"content": "<|end|>"})
    if place == "setting":
        change(adapter / "tokenizer_config.json", chat_template=SOURCE, eos_token="<|end|>")
    if place == "list":
        named = [{"name": "tool_use", "template": OTHER}, {"name": "default", "template": SOURCE}]
        change(adapter / "tokenizer_config.json", chat_template=named)
    text = settled(base, adapter).render(TALK, add_generation_prompt=False)
    assert text == as_in_transformers(base, SOURCE) == "<|system|>Chronic eczema<|end|>L20<|end|>"


def test_tokens_of_the_adapter_go_before_those_of_the_base_model(base: Path, adapter: Path) -> None:
    (adapter / "chat_template.jinja").write_text(SOURCE)
    change(adapter / "tokenizer_config.json", eos_token="<|user|>")
    text = settled(base, adapter).render(TALK, add_generation_prompt=False)
    assert text == "<|system|>Chronic eczema<|user|>L20<|user|>"


def test_an_adapter_without_a_template_is_asked_as_its_base_model(
    base: Path, adapter: Path
) -> None:
    change(adapter / "tokenizer_config.json", eos_token="<|end|>", tokenizer_class="LlamaTokenizer")
    text = settled(base, adapter).render(TALK, add_generation_prompt=False)
    assert text == as_in_transformers(base)


def test_a_tokenizer_that_transformers_saved_again_is_that_of_the_base_model(
    base: Path, adapter: Path
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer(["cut here"], truncation=True, max_length=3, padding="max_length")
    tokenizer.save_pretrained(adapter)
    text = settled(base, adapter).render(TALK, add_generation_prompt=False)
    assert text == as_in_transformers(base)
    check_tokenizer(base, adapter, adapter.with_name("tokenizer"))


def with_more_tokens(folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<call>"])
    tokenizer.save_pretrained(folder)


def with_a_prefix(folder: Path) -> None:
    rules = json.loads((folder / "tokenizer.json").read_text())
    rules["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(rules))


def with_a_token_made_special(folder: Path) -> None:
    change(folder / "tokenizer_config.json", additional_special_tokens=["<|user|>", "the"])


def with_a_pad_token(folder: Path) -> None:
    change(folder / "tokenizer_config.json", pad_token="[PAD]")


def with_a_listed_token(folder: Path) -> None:
    change(folder / "tokenizer_config.json", added_tokens_decoder={"4096": {"content": "<call>"}})


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (with_more_tokens, "is not that of the base model: it has 1 other tokens, number"),
        (with_a_prefix, "reads texts differently"),
        (with_a_token_made_special, "names a token in additional_special_tokens"),
        (with_a_pad_token, "names a token in pad_token that the base model has not"),
        (with_a_listed_token, "an added token 4096 that the base model has not"),
    ],
)
def test_an_adapter_that_was_trained_with_other_tokens_is_refused(
    base: Path, adapter: Path, changed: Callable[[Path], None], why: str
) -> None:
    tokenizer = adapter.with_name("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, tokenizer / name)
    changed(tokenizer)
    with pytest.raises(AdapterRefused, match=why):
        check_tokenizer(base, adapter, tokenizer)
