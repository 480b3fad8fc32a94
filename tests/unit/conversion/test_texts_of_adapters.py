"""An adapter from elsewhere was trained on the chat template and the tokens of its base model, or it is refused.

Templates are programs: those of adapters are compared as texts, and never compiled.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tuneship.conversion.received_adapter import AdapterFault, check_template
from tuneship.conversion.template_texts import portable_source
from tuneship.conversion.trained_tokenizer import check_tokenizer
from tuneship.prompts.template import PromptTemplate
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import load_tokenizer
from tuneship.service.catalogues.base_models import SHIPPED
from tuneship.serving.adapters import AdapterRefused

SOURCE = "{{ bos_token }}{%- for m in messages %}\n{{ m['content'] + eos_token }}{% endfor %}"
OTHER = "{{ bos_token }}{%- for m in messages %}{{ '-' + m['content'] + eos_token }}{% endfor %}"
ENDLESS = "{%- for m in messages %}{{ m['role'] + ': ' + m['content'] }} {% endfor %}"
# jinja would compute it while it compiles the template, for seconds.
BOMB = "{% if 9**(9**7) % 7 %}{% endif %}"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = shutil.copytree(SHIPPED / "tuneship-tiny", tmp_path / "base")
    change(folder / "tokenizer_config.json", bos_token="<|system|>")
    return folder


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    (tmp_path / "adapter").mkdir()
    return tmp_path / "adapter"


def change(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**content, **fields}))


def put(folder: Path, place: str, source: str, tools: str | None = None) -> None:
    """Write a template, and one for functions, where some version of transformers keeps them."""
    named = [{"name": "default", "template": source}]
    named += [] if tools is None else [{"name": "tool_use", "template": tools}]
    if place == "setting":
        change(folder / "tokenizer_config.json", chat_template=source if tools is None else named)
        return
    (folder / "chat_template.jinja").write_text(source)
    if tools is not None:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(tools)


def without_template(base: Path) -> None:
    (base / "chat_template.jinja").unlink(missing_ok=True)
    change(base / "tokenizer_config.json", chat_template=None)


@pytest.mark.parametrize("tools", [None, OTHER], ids=("one", "two"))
@pytest.mark.parametrize("place", ["file", "setting"])
def test_the_template_of_the_base_model_is_accepted_wherever_it_stands(
    base: Path, adapter: Path, place: str, tools: str | None
) -> None:
    without_template(base)
    put(base, "file", SOURCE, tools)
    check_template(base, adapter)
    put(adapter, place, SOURCE.replace("\n", "\r\n") + "\n", tools)
    check_template(base, adapter)
    if tools is None:
        put(adapter, place, portable_source(PromptTemplate.load(base)))
        check_template(base, adapter)


def test_a_template_of_a_tuning_that_appended_an_end_is_that_of_the_base_model(
    base: Path, adapter: Path
) -> None:
    without_template(base)
    put(base, "file", ENDLESS)
    found = ModelTextFormat.of_base(base, load_tokenizer(base))
    assert found.appended_end is not None
    assert found.template.source != ENDLESS
    for source in (ENDLESS, found.template.source, portable_source(found.template)):
        put(adapter, "file", source)
        check_template(base, adapter)


@pytest.mark.parametrize("source", [OTHER, BOMB + SOURCE, "{% for", ""])
@pytest.mark.parametrize("place", ["file", "setting", "for functions"])
def test_another_template_is_refused_without_compiling_it(
    base: Path, adapter: Path, source: str, place: str
) -> None:
    without_template(base)
    put(base, "file", SOURCE)
    if place == "for functions":
        put(adapter, "file", SOURCE, source)
    else:
        put(adapter, place, source or " ")
    with pytest.raises(AdapterFault, match=r"has a chat template of its own, .*models add"):
        check_template(base, adapter)


@pytest.mark.parametrize("setting", [{"tool_use": OTHER}, [7], {"default": {}}])
def test_a_template_that_cannot_be_read_is_refused(base: Path, adapter: Path, setting: Any) -> None:
    change(adapter / "tokenizer_config.json", chat_template=setting)
    with pytest.raises(AdapterFault, match="has a chat template "):
        check_template(base, adapter)


def test_special_tokens_matter_where_the_template_writes_them(base: Path, adapter: Path) -> None:
    without_template(base)
    put(base, "file", SOURCE)
    change(adapter / "special_tokens_map.json", eos_token={"content": "<|end|>"}, pad_token="x")
    check_template(base, adapter)
    change(adapter / "special_tokens_map.json", eos_token="<|user|>")
    with pytest.raises(AdapterFault, match="has another eos_token for its chat template"):
        check_template(base, adapter)


def test_a_tokenizer_that_transformers_saved_again_is_that_of_the_base_model(
    base: Path, adapter: Path
) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    tokenizer(["cut here"], truncation=True, max_length=3, padding="max_length")
    tokenizer.save_pretrained(adapter)
    check_template(base, adapter)
    check_tokenizer(base, adapter)


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
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, adapter / name)
    changed(adapter)
    with pytest.raises(AdapterRefused, match=why):
        check_tokenizer(base, adapter)
