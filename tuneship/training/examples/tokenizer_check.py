"""Compares how we read a model's texts with how transformers does: a model is tuned and served by the same tokens.

transformers builds some tokenizers from their vocabulary again, by the class that a configuration names, and adds the
tokens that tokenizer.json lacks. Loads transformers. Next: `tuneship/prompts/text_tokenizer.py`.
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tuneship.prompts.text_format import ANSWER, ASKED, ModelTextFormat

# What tokenizers differ in: spaces and line breaks in every place, digits, accents, other scripts, code, emoji.
TEXTS = (
    "The patient's cough lasted 3 weeks (17 days) at 38.5 °C.",
    " leading and  double   spaces \t tab \n\n line\r\nbreaks  ",
    "Größe naïve café Ångström ﬁ … 'quoted' “quotes” — ½ H₂O",
    "漢字かな 한국어 العربية हिन्दी 🙂👩‍⚕️ I'll DON'T we've 1234567",
    "def f(x):\n    return {'a': [x, 1e-5]}  # <b>&amp;</b>",
)
# Special tokens in the middle of a text, with and without spaces around them.
AROUND_SPECIAL = ("a{0}b", "a {0} b", "{0}\n\nb{0}")
MAX_SPECIAL_TOKENS = 64


def load_as_transformers(directory: Path) -> Any:
    """The tokenizer as `AutoTokenizer` loads it, from local files and without code of the checkpoint."""
    return AutoTokenizer.from_pretrained(
        str(directory), local_files_only=True, trust_remote_code=False
    )


def difference_from(reference: Any, ours: ModelTextFormat) -> str | None:
    """How our tokenizer reads texts differently from one of transformers; None if it does not."""
    untyped: Any = ours.tokenizer
    special = list(reference.get_added_vocab())[:MAX_SPECIAL_TOKENS]
    texts = [*TEXTS, *(form.format(token) for token in special for form in AROUND_SPECIAL)]
    for adds_special in (False, True):
        for text in texts:
            expected = reference(text, add_special_tokens=adds_special)["input_ids"]
            found = untyped.encode(text, add_special_tokens=adds_special).ids
            if found != expected:
                return "the tokens of a text"
            if not adds_special and untyped.decode(found) != reference.decode(
                expected, skip_special_tokens=True
            ):
                return "the text of tokens"
    if reference.chat_template is None or ours.appended_end is not None:
        return None
    turns: list[Any] = [ASKED, {"role": "assistant", "content": ANSWER}]
    for messages, asks in ((turns[:1], True), (turns, False)):
        expected = reference.apply_chat_template(
            messages, add_generation_prompt=asks, tokenize=False
        )
        if ours.template.render(messages, add_generation_prompt=asks) != expected:
            return "a conversation in the chat template"
    return None


def other_special_tokens(reference: Any, ours: ModelTextFormat) -> bool:
    """Whether a tokenizer of transformers has other special tokens, perhaps as defaults of its class."""
    known = ours.template.special_tokens
    names = reference.special_tokens_map
    return any(known.get(name, "") != text for name, text in names.items())
