"""Makes the grammar of answers that may call functions, and refuses functions that cannot be called.

Like `answer_grammar.py`, it runs in a thread. Next: `call_reader.py`.
"""

from dataclasses import dataclass
from typing import Any

from tuneship.contract.generation import Generate
from tuneship.contract.schemas.answer_schemas import read_schema
from tuneship.contract.schemas.tools import NO_PARAMETERS
from tuneship.prompts.tool_syntax import CallSyntax
from tuneship.service.answers.field_errors import field_error
from tuneship.service.generation.answer_grammar import FIELD, check_schema, schema_of
from tuneship.service.generation.call_reader import CallReader
from tuneship.service.models.served_models import ServedModel
from tuneship.serving.sampling.grammar import grammar_of_calls

UNKNOWN_SYNTAX = "is not supported for this model: its chat template writes calls in a form that is not read here"


@dataclass(frozen=True)
class CallPlan:
    """How the calls of an answer are written and read."""

    syntax: CallSyntax
    grammar: str
    # Whether an answer without a call is none.
    needs_call: bool
    # Whether free text may stand before calls.
    is_text_before: bool
    # The grammar of an answer without a call; None for free text.
    text_grammar: str | None
    # Special tokens that are no part of an answer's text.
    hidden_tokens: frozenset[int]

    def reader(self) -> CallReader:
        """A reader for one answer."""
        return CallReader(
            self.syntax, is_text_before=self.is_text_before, needs_call=self.needs_call
        )


def call_plan(served: ServedModel, request: Generate) -> CallPlan:
    """The plan for a request with functions. Raises `ValidationFailed`."""
    syntax = served.template.call_syntax
    if syntax is None:
        raise field_error("tools", UNKNOWN_SYNTAX, "unsupported_parameter")
    form = request.response_format
    needs_call = request.tool_choice == "required"
    is_text = not needs_call and (form is None or form.type == "text")
    otherwise: Any = "text" if is_text else None
    is_flexible = form is not None and form.whitespace_flexible
    text_grammar: str | None = None
    if not is_text and not needs_call and form is not None:
        read = schema_of(form)
        otherwise, text_grammar = read.schema, check_schema(read, FIELD, is_flexible=is_flexible)
        if not syntax.marker:
            text = "is not supported beside tools for this model, which marks its calls by their beginning alone"
            raise field_error("response_format", text, "unsupported_value")
    specials = served.base.special_tokens
    shown = {
        token
        for text, token in specials.items()
        if text in syntax.begin + syntax.middle + (syntax.between or "") + syntax.end
    }
    grammar = grammar_of_calls(
        syntax,
        _schemas(request),
        specials,
        otherwise=otherwise,
        is_parallel=request.parallel_tool_calls,
        is_flexible=is_flexible,
    )
    hidden = frozenset(specials.values()) - shown
    return CallPlan(syntax, grammar, needs_call, is_text, text_grammar, hidden)


def _schemas(request: Generate) -> dict[str, Any]:
    """The schemas of the arguments of each function that may be called. Raises `ValidationFailed`."""
    schemas: dict[str, Any] = {}
    callable_names = {tool.function.name for tool in request.callable_tools}
    for number, tool in enumerate(request.tools or ()):
        if tool.function.name not in callable_names:
            continue
        read = read_schema(tool.function.parameters or NO_PARAMETERS)
        check_schema(read, f"tools[{number}].function.parameters")
        schemas[tool.function.name] = read.schema
    return schemas
