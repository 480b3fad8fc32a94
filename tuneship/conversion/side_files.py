"""Writes the files beside the weights of an export, so that other programs tokenize and stop like our engine.

What is left out of the base model's files: settings of one call that somebody saved (truncation, padding), and names of
code that is not part of the export.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tuneship.conversion.logits import Talk
from tuneship.conversion.template_texts import portable_source
from tuneship.prompts.template import (
    SPECIAL_TOKEN_NAMES,
    SPECIAL_TOKENS_FILE,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    PromptTemplate,
)
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import TOKENIZER_FILE, encode, load_tokenizer
from tuneship.serving.models.model import ModelRefused
from tuneship.training.examples.tokenizer_check import difference_from, load_as_transformers

GENERATION_FILE = "generation_config.json"
# Reads tokenizer.json as it is. Many other classes build their tokenizer from the vocabulary alone.
PLAIN_CLASS = "PreTrainedTokenizerFast"


def write_side_files(
    base: Path,
    template: PromptTemplate,
    target: Path,
    talks: Sequence[Talk],
) -> None:
    """Write tokenizer, template and end tokens. Raises `ModelRefused` where transformers would read other tokens.

    `talks`: conversations that are compared.
    """
    rules = json.loads((base / TOKENIZER_FILE).read_text(encoding="utf-8"))
    if rules.get("truncation") is None and rules.get("padding") is None:
        shutil.copyfile(base / TOKENIZER_FILE, target / TOKENIZER_FILE)
    else:
        _write(target / TOKENIZER_FILE, {**rules, "truncation": None, "padding": None})
    (target / TEMPLATE_FILE).write_text(portable_source(template), encoding="utf-8")
    # Only what has a text: an empty special token lets `AutoTokenizer` recurse without end.
    tokens = {name: text for name, text in template.special_tokens.items() if text}
    config = read_object(base / TOKENIZER_CONFIG_FILE)
    for name in ("chat_template", "auto_map"):
        config.pop(name, None)
    _write(target / SPECIAL_TOKENS_FILE, _with(read_object(base / SPECIAL_TOKENS_FILE), tokens))
    _write(target / TOKENIZER_CONFIG_FILE, _with(config, tokens))
    generation = read_object(base / GENERATION_FILE)
    if not generation:
        model = read_object(base / "config.json")
        names = ("bos_token_id", "pad_token_id")
        generation = {name: model[name] for name in names if model.get(name) is not None}
    found = text_format(base, template)
    # Rendered now, since transformers writes the date of today where the template has one.
    asked = [
        (talk, encode(found.tokenizer, template.render(talk, add_generation_prompt=True)))
        for talk, _ in talks
    ]
    if found.stop_tokens:
        ends = list(found.stop_tokens)
        generation["eos_token_id"] = ends if len(ends) > 1 else ends[0]
    if found.stop_text is not None:
        generation["stop_strings"] = [found.stop_text]
    _write(target / GENERATION_FILE, generation)
    if not _reads_alike(target, asked, found):
        plain = {**_with(config, tokens), "tokenizer_class": PLAIN_CLASS}
        _write(target / TOKENIZER_CONFIG_FILE, plain)
        if not _reads_alike(target, asked):
            raise ModelRefused(
                "transformers reads a conversation differently from its tokenizer.json"
            )


def text_format(base: Path, template: PromptTemplate) -> ModelTextFormat:
    """How a model with this template reads and writes conversations, and where its answers end."""
    return ModelTextFormat.of_base(base, load_tokenizer(base)).with_template(template)


def read_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _with(settings: dict[str, Any], tokens: dict[str, str]) -> dict[str, Any]:
    """Settings that name exactly these special tokens, in the form that they have."""
    kept = {name: value for name, value in settings.items() if name not in SPECIAL_TOKEN_NAMES}
    for name, text in tokens.items():
        had = settings.get(name)
        kept[name] = had if isinstance(had, dict) and had.get("content") == text else text
    return kept


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _reads_alike(folder: Path, talks: Sequence[Talk], every: ModelTextFormat | None = None) -> bool:
    """Whether `AutoTokenizer` loads the folder and tokenizes conversations, or `every` text, like our own tokenizer."""
    try:
        tokenizer = load_as_transformers(folder)
        return (every is None or difference_from(tokenizer, every) is None) and all(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
            == prompt
            for messages, prompt in talks
        )
    except Exception:  # noqa: BLE001 (whatever a foreign configuration brings about)
        return False
