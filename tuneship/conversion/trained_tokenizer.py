"""Compares the tokenizer that an adapter was trained with, where its files came along, with that of its base model.

An adapter is served with the base model's tokenizer: one that was trained with more tokens, or with other ones, would
read texts differently.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tuneship.conversion.side_files import read_object
from tuneship.prompts.template import (
    SPECIAL_TOKEN_NAMES,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_CONFIG_FILE,
)
from tuneship.prompts.text_tokenizer import TOKENIZER_FILE, load_tokenizer
from tuneship.serving.adapters import AdapterRefused
from tuneship.training.examples.tokenizer_check import TEXTS


def check_tokenizer(base: Path, folder: Path) -> None:
    """Raise `AdapterRefused` where the files name a token that the base model has not, or read texts differently."""
    ours: Any = load_tokenizer(base)
    added = ours.get_added_tokens_decoder()
    if (folder / TOKENIZER_FILE).is_file():
        _compare(ours, folder)
    config = read_object(folder / TOKENIZER_CONFIG_FILE)
    named: dict[str, int] = read_object(folder / "added_tokens.json")
    for number, token in config.get("added_tokens_decoder", {}).items():
        named[token["content"]] = int(number)
    for content, number in named.items():
        if number not in added or added[number].content != content:
            raise AdapterRefused(
                f"it was trained with an added token {number} that the base model has not"
            )
    known = {token.content for token in added.values()}
    for file in (folder / TOKENIZER_CONFIG_FILE, folder / SPECIAL_TOKENS_FILE):
        for name, text in _special(read_object(file)):
            # An end token may be a plain one, and a token that is searched for in every text not.
            is_there = text in known or (
                name in SPECIAL_TOKEN_NAMES and ours.token_to_id(text) is not None
            )
            if not is_there:
                raise AdapterRefused(
                    f"its {file.name} names a token in {name} that the base model has not"
                )


def _compare(ours: Any, folder: Path) -> None:
    theirs: Any = load_tokenizer(folder)
    known, trained = ours.get_vocab(), theirs.get_vocab()
    if trained != known:
        more = sorted(number for token, number in trained.items() if known.get(token) != number)
        which = f"{len(more)} other tokens, number {more[0]} first" if more else "fewer tokens"
        raise AdapterRefused(f"its tokenizer.json is not that of the base model: it has {which}")
    tokens = [theirs.get_added_tokens_decoder(), ours.get_added_tokens_decoder()]
    rules = [
        {
            number: (one.lstrip, one.rstrip, one.single_word, one.normalized)
            for number, one in side.items()
        }
        for side in tokens
    ]
    texts = [*TEXTS, *(f"a {token.content} b{token.content}\n" for token in tokens[1].values())]
    found, expected = (
        [side.encode(text, add_special_tokens=False).ids for text in texts]
        for side in (theirs, ours)
    )
    if rules[0] != rules[1] or found != expected:
        raise AdapterRefused(
            "its tokenizer.json reads texts differently from that of the base model"
        )


def _special(settings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The names and texts of the special tokens that a configuration names."""
    for name in (*SPECIAL_TOKEN_NAMES, "additional_special_tokens", "extra_special_tokens"):
        value: Any = settings.get(name)
        if isinstance(value, dict) and "content" not in value:
            value = list(cast("dict[str, Any]", value).values())
        for one in cast("list[Any]", value) if isinstance(value, list) else [value]:
            # Written as a string, or as an object with the string under `content`.
            text = one.get("content") if isinstance(one, dict) else one
            if isinstance(text, str) and text:
                yield name, text
