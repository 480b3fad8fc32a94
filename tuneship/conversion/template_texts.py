"""Compares chat templates as texts, and writes them for other programs. Compiles none but the base model's."""

import re
from pathlib import Path

from tuneship.prompts.template import SPECIAL_TOKEN_NAMES, PromptTemplate, read_template
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import load_tokenizer


def portable_source(template: PromptTemplate) -> str:
    """The template for programs that have a text for special tokens that the model does not have."""
    missing = [name for name in SPECIAL_TOKEN_NAMES if not template.special_tokens.get(name)]
    used = [name for name in missing if _uses(template, name)]
    # The last tag keeps the white space at the beginning of the template.
    prefix = "".join(f"{{%- set {name} = '' -%}}{{{{ '' }}}}" for name in used)
    return prefix + template.source


def difference_from_base(base: Path, folder: Path) -> str | None:
    """How the template of an adapter's folder differs from that of its base model; None where it writes the same.

    The base model's own is accepted, the one that tunings on it have (with an end behind each answer where the base
    model writes none), and both as exports have them. Raises TemplateFailed, and ValueError for a damaged file.
    """
    source, tokens = read_template(folder)
    own = PromptTemplate.load(base)
    tuned = ModelTextFormat.of_base(base, load_tokenizer(base)).template
    texts = [text for one in (own, tuned) for text in (one.source, portable_source(one))]
    if source is not None and _plain(source) not in map(_plain, texts):
        return "a chat template of its own"
    for name, text in tokens.items():
        if _uses(own, name) and text != own.special_tokens.get(name, ""):
            return f"another {name} for its chat template"
    return None


def _uses(template: PromptTemplate, name: str) -> bool:
    return re.search(rf"\b{name}\b", template.source) is not None


def _plain(source: str) -> str:
    """The source as jinja reads it: uniform line breaks, and none at the end."""
    return source.replace("\r\n", "\n").replace("\r", "\n").removesuffix("\n")
