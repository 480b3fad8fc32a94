"""Functions, calls and results in chat templates: as transformers renders them, and in each template's own syntax."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.models.tiny_model import CHAT_TEMPLATE
from tuneship.contract.lines.dataset_lines import parse_example
from tuneship.contract.lines.tool_lines import tools_of
from tuneship.prompts.template import BUILT_IN_TEMPLATE, PromptTemplate, TemplateFailed
from tuneship.prompts.tool_syntax import CallSyntax
from tuneship.serving.sampling.grammar import accepts, grammar_of_calls
from tuneship.training.examples.conversation_rows import conversation_rows

TINY = Path(__file__).parents[3] / "tuneship" / "base_models" / "tuneship-tiny"
TEMPLATES = Path(__file__).parents[2] / "support" / "templates"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Über <b>",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
            "strict": True,
        },
    }
    for name in ("look_up", "explain")
]


def call(identifier: str, name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": identifier, "type": "function", "function": function}


LINE: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Is H25.9 valid?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                call("call_1", "look_up", code="H25.9 <é>", more=[1]),
                call("call_2", "explain"),
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "yes"},
        {"role": "tool", "tool_call_id": "call_2", "content": ""},
        {"role": "assistant", "content": "It is."},
        {"role": "user", "content": "And S52?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call("call_3", "look_up", code="S52")]},
    ],
    "tools": TOOLS,
    "parallel_tool_calls": True,
}  # fmt: skip
# A text, as of a model that never heard of functions, and one that allows no system turn and no turn out of order.
ALTERNATING = """\
{%- if messages[0].role == 'system' -%}{{ raise_exception('no system turns') }}{%- endif -%}
{%- for message in messages -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('order') }}{%- endif -%}
[{{ message.role }}]{{ message.content }}
{%- endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""
# One call a turn, without a mark at its beginning, as Llama 3 has it.
UNMARKED = """\
{%- for tool in tools or [] -%}{{ tool | tojson(indent=4) }}|{%- endfor -%}
{%- for message in messages -%}
<{{ message.role }}>
{%- if message.tool_calls -%}
{%- if message.tool_calls | length > 1 -%}{{ raise_exception('one call') }}{%- endif -%}
{%- set one = message.tool_calls[0].function -%}
{"name": "{{ one.name }}", "parameters": {{ one.arguments | tojson }}}
{%- else -%}{{ message.content }}{%- endif -%}<end>
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}"""
# Arguments one by one, as in XML: no JSON object that a grammar could follow.
# Arguments in the indentation of the whole call, and with separators of the template's own.
INDENTED = UNMARKED.replace(
    """{"name": "{{ one.name }}", "parameters": {{ one.arguments | tojson }}}""",
    "[CALL]{{ {'name': one.name, 'parameters': one.arguments} | tojson(indent=2) }}",
)
SEPARATED = UNMARKED.replace("| tojson }}}", "| tojson(separators=(' , ', ':')) }}}")
COMPACTED = UNMARKED.replace("| tojson }}}", "| tojson(separators=(',', ':')) }}}")
TAGGED = UNMARKED.replace(
    '{"name": "{{ one.name }}", "parameters": {{ one.arguments | tojson }}}',
    "<f={{ one.name }}>{% for k, v in one.arguments.items() %}<p={{ k }}>{{ v }}</p>{% endfor %}</f>",
)
WITH_ID = UNMARKED.replace('{"name"', '{"id": "{{ message.tool_calls[0].id }}", "name"')
SOURCES = {
    "knows": (TEMPLATES / "qwen2_5.jinja").read_text(),
    "shipped": (TINY / "chat_template.jinja").read_text(),
    "of tests": CHAT_TEMPLATE,
    "built in": BUILT_IN_TEMPLATE,
}
HERMES = CallSyntax(
    begin='<tool_call>\n{"name": "',
    middle='", "arguments": ',
    between='}\n</tool_call>\n<tool_call>\n{"name": "',
    end="}\n</tool_call>",
)


def template_of(source: str) -> PromptTemplate:
    return PromptTemplate(source, {"eos_token": "<|end|>"})


def by_transformers(source: str, messages: Any, tools: Any, *, asks: bool) -> str:
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_file=str(TINY / "tokenizer.json"), eos_token="<|end|>", chat_template=source
    )
    return tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=asks
    )


@pytest.mark.parametrize("asks", [True, False])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_line_is_rendered_as_transformers_renders_it(source: str, asks: bool) -> None:
    template = template_of(source)
    messages, tools = parse_example(LINE, "conversation"), tools_of(LINE)
    # What an adapter's folder has after a training with functions.
    saved = template.with_tools.source
    rendered = template.render(messages, add_generation_prompt=asks, tools=tools)
    assert rendered == by_transformers(saved, messages, tools, asks=asks)
    assert '{"code": "H25.9 <é>", "more": [1]}' in rendered
    assert "Über <b>" in rendered
    plain = [*messages[:2], messages[5]]
    assert template.render(plain, add_generation_prompt=asks) == by_transformers(
        saved, plain, None, asks=asks
    )


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_prompts_without_functions_are_rendered_as_before(source: str) -> None:
    template = template_of(source)
    turns = [{"role": role, "content": role} for role in ("system", "user", "tool")]
    before = template._template.render(
        messages=turns, add_generation_prompt=True, **template.special_tokens
    )
    for one in (template, template.with_tools):
        assert one.render(turns, add_generation_prompt=True) == before


def test_a_template_that_knows_functions_is_used_as_it_is() -> None:
    knowing = template_of(SOURCES["knows"])
    assert knowing.with_tools is knowing
    assert knowing.call_syntax == HERMES
    assert HERMES.marker == "<tool_call>"


def test_a_template_that_needs_functions_for_a_conversation_with_calls_is_used_as_it_is() -> None:
    needing = template_of(UNMARKED.replace("tools or []", "tools"))
    assert needing.with_tools is needing
    assert needing.call_syntax == template_of(UNMARKED).call_syntax


@pytest.mark.parametrize("source", [SOURCES["shipped"], SOURCES["of tests"], ALTERNATING])
def test_a_template_without_functions_writes_them_as_turns(source: str) -> None:
    template = template_of(source)
    assert template.call_syntax == HERMES
    again = PromptTemplate(template.with_tools.source, template.special_tokens)
    assert again.with_tools is again
    assert again.call_syntax == HERMES


def test_functions_stand_in_the_first_turn_of_the_user_where_there_is_no_system_turn() -> None:
    template = template_of(ALTERNATING)
    messages = parse_example({**LINE, "messages": LINE["messages"][1:]}, "conversation")
    rendered = template.render(messages, add_generation_prompt=False, tools=TOOLS)
    listed = [
        json.dumps(one["function"], ensure_ascii=False, separators=(",", ":")) for one in TOOLS
    ]
    start = "[user]<tools>\n" + "\n".join(listed) + "\n</tools>\nA call:\n<tool_call>\n"
    assert rendered.startswith(start)
    assert "</tool_call>\n\nIs H25.9 valid?[assistant]<tool_call>\n" in rendered
    assert (
        "[user]<tool_response>\nyes\n</tool_response>\n<tool_response>\n\n</tool_response>[assistant]It is."
        in rendered
    )
    assert rendered.endswith(
        '[assistant]I look.\n<tool_call>\n{"name": "look_up", "arguments": {"code": "S52"}}\n</tool_call>'
    )


def test_a_syntax_without_a_mark_and_with_one_call_is_read_off() -> None:
    syntax = template_of(UNMARKED).call_syntax
    assert syntax == CallSyntax('{"name": "', '", "parameters": ', None, "}")
    assert syntax.marker == ""


@pytest.mark.parametrize(
    ("source", "separators"),
    [
        (UNMARKED, (", ", ": ")),
        (COMPACTED, (",", ":")),
        (SEPARATED, (" , ", ":")),
        (INDENTED, None),
        (SOURCES["knows"], (", ", ": ")),
        (BUILT_IN_TEMPLATE, (", ", ": ")),
    ],
)
def test_a_grammar_allows_the_calls_that_a_template_writes(source: str, separators: Any) -> None:
    template = template_of(source)
    syntax = template.call_syntax
    assert syntax is not None
    assert syntax.separators == separators
    arguments = {"code": "H25.9 <é>", "more": [1, {"deep": [True, None]}, []], "none": {}}
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call("call_1", "look_up", **arguments)],
    }
    messages = parse_example({"messages": [LINE["messages"][1], said]}, "conversation")
    prompt = template.render(messages[:1], add_generation_prompt=True, tools=TOOLS)
    whole = template.render(messages, add_generation_prompt=False, tools=TOOLS)
    learnt = re.sub(r"(<end>|<\|im_end\|>|<\|end\|>)\s*$", "", whole.removeprefix(prompt)).strip()
    assert learnt.startswith(syntax.begin)
    grammar = grammar_of_calls(
        syntax, {"look_up": {"type": "object"}}, {}, otherwise=None, is_parallel=True
    )
    assert accepts(grammar, learnt)
    # What its limit would cut: white space without an end.
    assert not accepts(grammar, learnt.replace(":", ":" + " " * 99))


@pytest.mark.parametrize("source", [TAGGED, WITH_ID])
def test_a_syntax_that_is_no_text_around_json_is_none(source: str) -> None:
    template = template_of(source)
    assert template.with_tools is template
    assert template.call_syntax is None


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_only_what_the_assistant_writes_is_learnt(source: str) -> None:
    template = template_of(source)
    messages, tools = parse_example(LINE, "conversation"), tools_of(LINE)
    [segments] = conversation_rows(messages, template, tools)
    whole = template.render(messages, add_generation_prompt=False, tools=tools)
    assert whole.startswith("".join(segment.text for segment in segments))
    learnt = [segment.text for segment in segments if segment.is_target]
    two = (
        '<tool_call>\n{"name": "look_up", "arguments": {"code": "H25.9 <é>", "more": [1]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "explain", "arguments": {}}\n</tool_call>'
    )
    one = 'I look.\n<tool_call>\n{"name": "look_up", "arguments": {"code": "S52"}}\n</tool_call>'
    # The built-in template has a space before each answer.
    assert [text.partition("<|")[0].lstrip() for text in learnt] == [two, "It is.", one]


def test_a_template_that_writes_one_call_a_turn_refuses_a_line_with_two() -> None:
    with pytest.raises(TemplateFailed):
        conversation_rows(
            parse_example(LINE, "conversation"), template_of(UNMARKED), tools_of(LINE)
        )
