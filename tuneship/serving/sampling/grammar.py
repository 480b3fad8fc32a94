"""Grammars for structured answers: the text for `llguidance` that represents a schema, and the limits of its work.

The service checks a schema with it before the request is sent, a replica compiles it (`guides.py`). Never loads torch.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from tuneship.prompts.tool_syntax import CallSyntax

# A name has one spelling only: with `\u0061` for `a`, an additional property could be a declared one that does not fit.
_OPTIONS: Any = {"json_allowed_escapes": '"\\bfnrt', "lenient": False}
# What stands between two items, and between a name and its value.
Separators = tuple[str, str]
COMPACT: Separators = (",", ":")
SPACED: Separators = (", ", ": ")
# A space, or a new line with its indentation: up to 4 spaces for each of the 12 levels of a schema, and one more. With
# any number of them, a model that has seen little JSON would write whitespace until its tokens are used up.
_FLEXIBLE: Any = {"whitespace_pattern": r"\x20|\n(\x20{0,52}|\t{0,13})"}
# A step of one grammar stays below a few milliseconds, and compiling it below some tenths of a second: the size and the
# first fuel are several times what the largest schemas of programs need. Errors do not quote the schema.
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    max_grammar_size=20_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    verbose_errors=False,
)
# Any tokenizer shows whether a grammar can be followed; this one has the 256 bytes and some special tokens.
_BYTES = LLTokenizer("byte")


def grammar_of(schema: Mapping[str, Any], *, is_flexible: bool = False) -> str:
    """The grammar of the JSON texts that fit a schema. Raises `ValueError` for a schema that JSON cannot hold.

    The texts are compact or spaced, `is_flexible` allows new lines and indentation as well.
    """
    return f"%llguidance {{}}\nstart: {_json(schema, None if is_flexible else SPACED)}\n"


def spellings(grammar: str) -> list[str]:
    """The grammar of compact JSON and the one of spaced JSON; the grammar itself where it is not for both."""
    both = _begin(SPACED)
    if both not in grammar:
        return [grammar]
    return [grammar.replace(both, _begin(one, is_exact=True)) for one in (COMPACT, SPACED)]


def grammar_of_calls(
    syntax: CallSyntax,
    functions: Mapping[str, Mapping[str, Any]],
    special_tokens: Mapping[str, int],
    *,
    otherwise: Mapping[str, Any] | str | None,
    is_parallel: bool,
    is_flexible: bool = False,
) -> str:
    """The grammar of answers that call one of these functions, given with the schemas of their arguments.

    `otherwise` is what an answer without a call may be: JSON that fits a schema, indented if `is_flexible`, any text
    for "text", or nothing. Only free text may stand before a call. Raises `ValueError` for a schema that JSON cannot
    hold.
    """

    def literal(text: str) -> str:
        return _literal(text, special_tokens)

    more = f" ({literal(syntax.between)} call)*" if is_parallel and syntax.between else ""
    lines = [
        "%llguidance {}",
        "start: answer",
        *_rules_of_answers(syntax, special_tokens, otherwise, None if is_flexible else SPACED),
        f"calls: call{more} {literal(syntax.end)}",
        "call: " + " | ".join(f"call_{number}" for number in range(len(functions))),
    ]
    lines += [
        f"call_{number}: {json.dumps(name)} {literal(syntax.middle)} {_json(schema, syntax.separators)}"
        for number, (name, schema) in enumerate(functions.items())
    ]
    return "\n".join(lines) + "\n"


def _rules_of_answers(
    syntax: CallSyntax,
    special_tokens: Mapping[str, int],
    otherwise: Mapping[str, Any] | str | None,
    separators: Separators | None,
) -> list[str]:
    """The rules of an answer, up to the name in its first call."""
    begin, marker = syntax.begin, syntax.marker
    calls = f"{_literal(begin, special_tokens)} calls"
    if otherwise is None:
        return [f"answer: {calls}"]
    if not isinstance(otherwise, str):
        return [f"answer: {calls} | other", f"other: {_json(otherwise, separators)}"]
    if not marker:
        first = re.escape(begin[0])
        return [f"answer: {calls} | OTHER", f"OTHER: /([^{first}](.|\\n)*)?/"]
    # Text ends at the first marker, or it could hold one; a special token is no text anyway.
    is_special = any(one in marker for one in special_tokens)
    return [
        f"answer: TEXT | trigger {_literal(begin[len(marker) :], special_tokens)} calls",
        "TEXT: /(.|\\n)*/",
        f"trigger{'' if is_special else '[lazy]'}: TEXT {_literal(marker, special_tokens)}",
    ]


def _json(schema: Mapping[str, Any], separators: Separators | None) -> str:
    """The JSON texts that fit a schema, within a grammar; without separators they may be indented."""
    more = json.dumps(schema, allow_nan=False)[1:]
    return f"{_begin(separators)}{', ' if schema else ''}{more}"


def _begin(separators: Separators | None, *, is_exact: bool = False) -> str:
    """The text before the keywords of a schema. The usual separators represent both spellings unless `is_exact`.

    A schema holds no such text, as its own texts are quoted.
    """
    if separators is None:
        spaces = _FLEXIBLE
    elif separators in (COMPACT, SPACED) and not is_exact:
        spaces = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
    else:
        item, key = separators
        spaces = {"whitespace_flexible": False, "item_separator": item, "key_separator": key}
    return f'%json {{"x-guidance": {json.dumps(_OPTIONS | spaces)}'


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """A text within a grammar; special tokens are written by their ids."""
    present = sorted((one for one in special_tokens if one in text), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, present))})", text) if present else [text]
    written = (
        f"<[{special_tokens[piece]}]>"
        if piece in special_tokens
        else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    )
    return " ".join(written)


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
