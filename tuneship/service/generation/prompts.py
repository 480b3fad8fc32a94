"""A prompt as tokens: only the model's template may write special tokens, what a caller sends is always text.

A prompt that says `<|system|>` would otherwise open a turn of its own. Training reads special tokens in its examples as
such, and a dataset with some is warned about: the author of a dataset writes turns, the author of a prompt must not.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.common.refusals import refused
from tuneship.template import PromptTemplate

# Characters that mean nothing: they stand for special tokens while the template lays out the
# text.
PRIVATE_USE = range(0xF0000, 0xFFFFE)


def prompt_tokens(
    base: CataloguedModel,
    template: PromptTemplate,
    messages: Sequence[Mapping[str, Any]],
    param: str,
) -> list[int]:
    """Token ids up to where the assistant speaks. Raises `ValidationRefused` on `param` for what cannot be text."""
    markers = base.special_texts
    texts = [str(message["content"]) for message in messages]
    if markers is None or not any(map(markers.search, texts)):
        _refuse_other_spellings(base, texts, param)
        return _encoded(base, template.render(messages, add_generation_prompt=True))
    found = sorted({text for one in texts for text in markers.findall(one)})
    used = set("".join(texts))
    free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    hidden = dict(zip(found, free, strict=False))
    turns = [
        {**message, "content": markers.sub(lambda match: hidden[match[0]], text)}
        for message, text in zip(messages, texts, strict=True)
    ]
    _refuse_other_spellings(base, [turn["content"] for turn in turns], param)
    shown = {mark: text for text, mark in hidden.items()}
    pieces = re.split(f"([{''.join(shown)}])", template.render(turns, add_generation_prompt=True))
    tokens: list[int] = []
    for piece in pieces:
        tokens += _as_text(base, shown[piece], param) if piece in shown else _encoded(base, piece)
    return tokens


def _encoded(base: CataloguedModel, text: str) -> list[int]:
    tokenizer: Any = base.tokenizer
    # Unlike `encode`, this one lets other threads work meanwhile.
    return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _as_text(base: CataloguedModel, special: str, param: str) -> list[int]:
    """A special token's text, cut so that no part is one: the parts' tokens spell the same."""
    markers = base.special_texts
    for parts in ([special[:1], special[1:]], list(special)):
        if markers is None or not any(map(markers.search, parts)):
            return [token for part in parts for token in _encoded(base, part)]
    raise refused(param, "holds a special token of the model, which is a single character")


def _refuse_other_spellings(base: CataloguedModel, texts: Sequence[str], param: str) -> None:
    """A tokenizer that normalizes first may find a special token that is written otherwise, e.g. in wide letters."""
    normalizer: Any = base.tokenizer.normalizer
    markers = base.normalized_special_texts
    if normalizer is None or markers is None:
        return
    if any(markers.search(normalizer.normalize_str(text)) for text in texts):
        raise refused(param, "holds a special token of the model in another spelling")
