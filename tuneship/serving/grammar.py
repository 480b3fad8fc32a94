"""Grammars of structured answers: which text of `llguidance` stands for a schema, and the limits of its work.

The service checks a schema with it before the request is sent, a replica compiles it (`guides.py`). Never loads torch.
"""

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# A schema at these limits compiles within half a second.
MAX_SCHEMA_CHARACTERS = 65_536
# Recursion in the compiler follows references: 5,000 of them overflow its stack.
MAX_SCHEMA_VALUES = 2_000
# Every optional property is a branch of the grammar, whose parser refuses 2,000 of them at one place.
MAX_PROPERTIES = 256
# Whitespace is bounded, so that a model cannot write it until its tokens are used up. A name has one spelling only:
# with `\u0061` for `a`, an additional property could be a declared one that does not fit.
_OPTIONS: dict[str, Any] = {
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}",
    "json_allowed_escapes": '"\\bfnrt',
    "lenient": False,
}
# A step of one grammar stays below a few milliseconds; errors do not quote the schema.
LIMITS = LLParserLimits(
    step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000, verbose_errors=False
)


def grammar_of(schema: Mapping[str, Any]) -> str:
    """The grammar of the JSON texts that fit a schema."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS)


def is_usable(grammar: str) -> bool:
    """Whether the grammar can be compiled within the limits."""
    is_error, _ = LLMatcher.validate_grammar_with_warnings(grammar, limits=LIMITS)
    return not is_error


def accepts(grammar: str, text: str) -> bool:
    """Whether the whole text is an answer that the grammar accepts."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=LIMITS)
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
