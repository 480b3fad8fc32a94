"""Grammars of structured answers: which text of `llguidance` stands for a schema, and the limits of its work.

The service checks a schema with it before the request is sent, a replica compiles it (`guides.py`). Never loads torch.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Between two parts comes a space or the indentation of a new line: a model that has seen little JSON would otherwise
# write whitespace until its tokens are used up. A name has one spelling only: with `\u0061` for `a`, an additional
# property could be a declared one that does not fit.
_OPTIONS: Any = {
    "whitespace_pattern": r"\x20|\n(\x20{0,24}|\t{0,12})",
    "json_allowed_escapes": '"\\bfnrt',
    "lenient": False,
}
# A step of one grammar stays below a few milliseconds; errors do not quote the schema.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False
)
# Any tokenizer shows whether a grammar can be followed; this one has the 256 bytes and some special tokens.
_BYTES = LLTokenizer("byte")


def grammar_of(schema: Mapping[str, Any]) -> str:
    """The grammar of the JSON texts that fit a schema. Raises `ValueError` for a schema that JSON cannot hold."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)


def is_usable(grammar: str) -> bool:
    """Whether the grammar can be compiled within the limits, and an answer can begin."""
    matcher = _matcher(grammar)
    mask = np.zeros((_BYTES.vocab_size + 31) // 32, dtype=np.int32)
    if not matcher.is_error():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return not matcher.is_error() and not matcher.is_stopped()


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text is an answer that the grammar accepts."""
    matcher = _matcher(grammar)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def _matcher(grammar: str) -> LLMatcher:
    return LLMatcher(_BYTES, grammar, log_level=0, limits=LIMITS)
