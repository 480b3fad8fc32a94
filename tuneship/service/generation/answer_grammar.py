"""Makes the grammar of a structured answer, and refuses a schema that cannot be followed.

It takes a few milliseconds, and some tenths of a second for the largest schemas, so it runs in a thread.
"""

from functools import lru_cache

from tuneship.contract.generation import ResponseFormat
from tuneship.contract.schemas.answer_schemas import AnswerSchema, read_schema
from tuneship.contract.schemas.schema_keywords import SUBSCHEMAS
from tuneship.service.answers.field_errors import field_error
from tuneship.serving.sampling.grammar import grammar_of, is_usable

FIELD = "response_format.schema"
UNUSABLE = "cannot be followed: nothing fits it, options of a oneOf overlap, or it is too large or too complex"
# Grammars whose check is remembered; a program asks with the same schema again and again.
REMEMBERED = 256
_is_usable = lru_cache(REMEMBERED)(is_usable)


def answer_grammar(form: ResponseFormat) -> str:
    """The grammar of answers in this form, which is no free text. Raises `ValidationFailed`."""
    return check_schema(schema_of(form), FIELD, is_flexible=form.whitespace_flexible)


def schema_of(form: ResponseFormat) -> AnswerSchema:
    """The schema of answers in this form, which is no free text."""
    return read_schema({"type": "object"} if form.json_schema is None else form.json_schema)


def check_schema(read: AnswerSchema, field: str, *, is_flexible: bool = False) -> str:
    """The grammar for a schema. Raises `ValidationFailed` on `field` if no grammar can follow the schema."""
    try:
        grammar = grammar_of(read.schema, is_flexible=is_flexible)
    except ValueError:  # a number or a text that JSON holds in no portable way
        raise field_error(field, "holds a value that is not supported") from None
    if _is_usable(grammar):
        return grammar
    # The place of the first schema without others in it that cannot be followed by itself.
    inner = {"$ref", *SUBSCHEMAS}
    for place, part in read.parts.items():
        if part and not inner & part.keys() and not is_usable(grammar_of(part)):
            raise field_error(field + place, UNUSABLE)
    raise field_error(field, UNUSABLE)
