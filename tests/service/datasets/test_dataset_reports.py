"""Validate and upload report errors, warnings, suggestions and counts of a file, never its text."""

import json
from typing import Any

import pytest

from tests.support.service.in_process import LINES, Service, jsonl
from tuneship.service.datasets.hints import SeenExamples
from tuneship.service.datasets.token_counting import SLICE_CHARACTERS, TokenCounter

pytestmark = pytest.mark.both_databases(postgres="soak")
TALK = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}
SECRET = "the patient's own words"


def test_a_good_file_has_nothing_to_suggest(shared: Service) -> None:
    report = shared.validate(jsonl(*LINES))
    assert (report["is_valid"], report["suggestions"], report["warnings"]) == (True, [], [])
    assert report["tokenizer"] == "tuneship-tiny"
    assert report["format_details"] == {
        "format": "instruction",
        "has_instructions": True,
        "has_responses": True,
    }


def test_line_ends_marks_and_blank_lines_are_no_errors(shared: Service) -> None:
    content = b"\xef\xbb\xbf" + jsonl(*LINES).replace(b"\n", b"\r\n\r\n  \n")[:-6]
    report = shared.validate(content)
    assert (report["is_valid"], report["num_examples"]) == (True, len(LINES))
    assert report["suggestions"] == [
        "A byte order mark at the start was removed.",
        f"Blank lines were skipped: {2 * len(LINES) - 2}.",
    ]
    assert report["total_tokens"] == shared.validate(jsonl(*LINES))["total_tokens"]


def test_other_names_are_reported(shared: Service) -> None:
    lines = [{"prompt": f"a{number}", "output": "b"} for number in range(2)]
    assert shared.validate(jsonl(*lines))["suggestions"] == [
        "The field output is read as response.",
        "The field prompt is read as instruction.",
    ]
    talk = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    report = shared.validate(jsonl(talk, TALK), format="conversation")
    assert report["suggestions"] == [
        "The field conversations (with from and value) is read as messages (with role and content)."
    ]


def test_a_field_that_nobody_reads_is_named_with_its_count(shared: Service) -> None:
    turn = {"role": "user", "content": "a", "name": "Bob"}
    answers = [{"role": "assistant", "content": str(n), "refusal": None} for n in range(1200)]
    lines = [{"messages": [turn, one], "parallel_tool_calls": True} for one in answers]
    report = shared.validate(jsonl(*lines, TALK), format="conversation")
    named = [
        "`messages[].name` in 1,200 lines is ignored.",
        "`parallel_tool_calls` in 1,200 lines is ignored.",
    ]
    assert report["suggestions"] == named
    form = {"name": "n", "format": "conversation"}
    made = shared.call("POST", "/v1/datasets", data=form, files={"file": jsonl(*lines, TALK)})
    assert made.json()["suggestions"] == named
    found = shared.call("GET", f"/v1/datasets/{made.json()['id']}").json()
    assert found["suggestions"] == named
    assert "suggestions" not in shared.call("GET", f"/v1/datasets/{shared.dataset()}").json()


def test_few_names_of_fields_are_reported_and_none_that_may_be_a_text(shared: Service) -> None:
    long = "x" * 100_000
    lines = [
        {**LINES[0], "instruction": str(n), f"key_{n}": 1, SECRET: 2, long: 3} for n in range(40)
    ]
    found = shared.validate(jsonl(*lines))["suggestions"]
    assert found[-1] == "Fields of other names in 40 lines are ignored."
    assert found[:-1] == [f"`key_{n}` in 1 line is ignored." for n in range(10)]


def test_every_conversion_is_said_in_one_line(shared: Service) -> None:
    call = json.dumps({"name": "f", "arguments": {}})
    turns = [("human", "a"), ("tool_call", call), ("tool_response", "b"), ("gpt", "c")]
    conversation = [{"from": role, "value": text} for role, text in turns]
    older = {"role": "assistant", "function_call": json.loads(call)}
    lines = [
        {"conversations": conversation, "system": "s", "tools": "[]"},
        {"messages": [TALK["messages"][0], older], "functions": [{"name": "f"}]},
        {"prompt": [{"role": "developer", "content": "s"}, *TALK["messages"]], "completion": "d"},
    ]
    lines[2]["prompt"].append(TALK["messages"][0])
    assert shared.validate(jsonl(*lines), format="conversation")["suggestions"] == [
        "The field conversations (with from and value) is read as messages (with role and content).",
        "The field system is read as the first turn.",
        "The field functions is read as tools.",
        "The field function_call is read as tool_calls.",
        "The turns of prompt and completion are read as messages; only those of completion are learnt.",
        "The role tool_call is read as assistant, and its text as calls.",
        "The role developer is read as system.",
        "The role tool_response is read as tool.",
    ]
    alpaca = [{"instruction": "a", "output": str(n), "history": [["b", ""]]} for n in range(2)]
    assert shared.validate(jsonl(*alpaca))["suggestions"] == [
        "The field output is read as response.",
        "The field history is read as earlier turns, whose answers are learnt, too.",
        'Examples in which the assistant says nothing, and learns it: 2. "weight": 0 keeps a turn from being learnt.',
    ]


def test_a_warning_names_the_field_where_the_text_stands(shared: Service) -> None:
    phone = "call 555-123-4567"
    talk = {"conversations": [{"from": "human", "value": phone}, {"from": "gpt", "value": "b"}]}
    talk["system"] = phone
    alpaca = {"instruction": "a", "output": phone, "history": [["b", phone]], "system": "s"}
    found = shared.validate(jsonl(talk), format="conversation")["warnings"]
    found += shared.validate(jsonl(alpaca))["warnings"]
    fields = ["system", "conversations[0].value", "history[0][1]", "response"]
    assert [one["field"] for one in found] == fields


def with_call(code: str, description: str = "d") -> dict[str, Any]:
    """An example with a function and a call of it."""
    function = {"name": "look_up", "arguments": json.dumps({"code": code})}
    call = {"id": "c", "type": "function", "function": function}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    tool = {"type": "function", "function": {"name": "look_up", "description": description}}
    return {"messages": messages, "tools": [tool]}


def test_calls_and_functions_are_counted_compared_and_searched(shared: Service) -> None:
    lines = [with_call("H25"), with_call("H26"), with_call("H25", "e"), with_call("H25")]
    report = shared.validate(jsonl(*lines), format="conversation")
    assert (report["is_valid"], report["num_examples"]) == (True, 4)
    assert [(one["line"], one["code"]) for one in report["warnings"]] == [(4, "duplicate_example")]
    talk = {**TALK, "messages": [TALK["messages"][0], {"role": "assistant", "content": "b"}]}
    plain, one = (
        shared.validate(jsonl(line), format="conversation")["token_distribution"]
        for line in (talk, with_call("H25"))
    )
    assert one["prompt_tokens"] > plain["prompt_tokens"] + 10, "functions are read"
    assert one["response_tokens"] > plain["response_tokens"] + 10, "calls are written"
    marked = with_call("<|end|>", "write to a@b.org")
    found = shared.validate(jsonl(marked), format="conversation")["warnings"]
    assert {(problem["field"], problem["code"]) for problem in found} == {
        ("messages[1].tool_calls", "special_token"),
        ("tools", "suspected_phi"),
    }


def test_a_line_whose_functions_do_not_fit_the_context_is_reported(shared: Service) -> None:
    long = with_call("H25", "word " * 500)
    (warning,) = shared.validate(jsonl(long), format="conversation")["warnings"]
    assert (warning["line"], warning["code"]) == (1, "too_long")


@pytest.mark.parametrize(
    ("name", "code", "field"),
    [
        (SECRET, "invalid_tool", "tools[0].function.name"),
        ("other", "invalid_tool_call", "messages[1].tool_calls[0].function.name"),
    ],
)
def test_a_bad_function_is_refused_by_its_place_in_every_way(
    shared: Service, name: str, code: str, field: str
) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    content = jsonl(TALK, {**with_call("H25"), "tools": tools})
    problems = shared.validate(content, format="conversation")["errors"]
    assert [(one["line"], one["code"], one["field"]) for one in problems] == [(2, code, field)]
    assert SECRET not in json.dumps(problems)
    form = {"name": "bad", "format": "conversation"}
    answer = shared.call("POST", "/v1/datasets", data=form, files={"file": content})
    assert answer.status_code == 422
    assert SECRET not in answer.text


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (json.dumps(LINES, indent=1).encode(), "JSON array"),
        (json.dumps(LINES[0], indent=1).encode(), "JSON document"),
        (b"instruction,response\na,b\n", "not JSON Lines"),
        (jsonl(*LINES).decode().encode("utf-16"), "UTF-16"),
        (b"\x1f\x8b\x08", "unpack"),
        (jsonl(TALK, TALK), "format=conversation"),
        (jsonl(LINES[0]), "at least 2 examples"),
        (jsonl(*LINES).decode().encode("utf-16-le"), "UTF-16"),
        (jsonl(*LINES).replace(b"\n", b"\r"), "carriage returns alone"),
        (b'{"instruction": "a", "response": NaN}\n', "NaN and Infinity are no JSON"),
        (json.dumps(LINES).encode(), "JSON array"),
        (b"{'instruction': 'a', 'response': 'b'}\n", "each line must look like"),
        (b"PAR1....", "is Parquet"),
        (jsonl({"prompt": TALK["messages"][:1], "completion": "b"}), "format=conversation"),
        (jsonl({"text": "a"}), "text alone"),
        (jsonl({"prompt": "a", "chosen": "b", "rejected": "c"}), "are preferences"),
    ],
)
def test_a_file_of_another_kind_is_answered_with_what_to_do(
    shared: Service, content: bytes, hint: str
) -> None:
    (suggestion,) = shared.validate(content)["suggestions"]
    assert hint in suggestion


def test_preferences_in_turns_are_named_as_such(shared: Service) -> None:
    question, answer = TALK["messages"][:1], TALK["messages"][-1:]
    content = jsonl({"prompt": question, "chosen": answer, "rejected": answer})
    report = shared.validate(content, format="conversation")
    assert [(one["field"], one["code"]) for one in report["errors"]] == [
        ("completion", "missing_field")
    ]
    assert "are preferences" in report["suggestions"][0]


def test_a_line_of_json_with_a_fault_of_its_own_is_not_called_another_kind_of_file(
    shared: Service,
) -> None:
    report = shared.validate(b'{"instruction": "\\ud83d", "response": "b"}\n')
    assert report["errors"][0]["message"] == "holds a lone surrogate"
    assert report["suggestions"] == []


def test_warnings_name_line_field_and_code_but_never_the_text(shared: Service) -> None:
    lines = [
        {"instruction": "call 555-123-4567", "response": "b"},
        {"instruction": "a", "response": "his number is 078-05-1120"},
        {"instruction": "write to jane.doe@example.org", "response": "MRN: 4711000"},
        {"instruction": "a <|end|> in between", "response": "b"},
        {"response": "b", "instruction": "call 555-123-4567", "metadata": {"other": 1}},
        {"instruction": "word " * 600, "response": "b"},
        {"instruction": "E11.65, 2024-01-02, 1,234,567.89, 10.1000/x", "response": "1-800"},
    ]
    report = shared.validate(jsonl(*lines))
    assert report["is_valid"]
    assert [(one["line"], one["field"], one["code"]) for one in report["warnings"]] == [
        (1, "instruction", "suspected_phi"),
        (2, "response", "suspected_phi"),
        (3, "instruction", "suspected_phi"),
        (3, "response", "suspected_phi"),
        (4, "instruction", "special_token"),
        (5, "instruction", "suspected_phi"),
        (5, None, "duplicate_example"),
        (6, None, "too_long"),
    ]
    assert report["warning_count"] == 8
    assert len(report["suggestions"]) == 4
    text = json.dumps(report)
    assert not any(word in text for word in ("555", "078-05", "jane", "4711", "<|end|>"))


def test_every_error_is_counted_and_the_first_thousand_are_named(shared: Service) -> None:
    report = shared.validate(jsonl(*LINES) + b"[]\n" * 1200 + jsonl({"instruction": SECRET}))
    assert (report["error_count"], report["errors_truncated"]) == (1201, True)
    assert len(report["errors"]) == 1000
    assert report["errors"][0] == {
        "line": len(LINES) + 1,
        "field": None,
        "code": "not_object",
        "message": "must be a JSON object",
    }
    assert report["num_examples"] == len(LINES)


def test_a_line_that_is_too_long_is_skipped_and_the_rest_is_read(shared: Service) -> None:
    content = jsonl(*LINES) + b'{"instruction":"' + b"a" * (8 << 20) + b'"}\n' + b"[]\n"
    report = shared.validate(content)
    found = [(one["line"], one["code"]) for one in report["errors"]]
    assert found == [(len(LINES) + 1, "line_too_long"), (len(LINES) + 2, "not_object")]


def test_the_turns_of_a_bad_conversation_are_seen(shared: Service) -> None:
    line = {"messages": [{"role": "user", "content": "a"}]}
    details = shared.validate(jsonl(line), format="conversation")["format_details"]
    assert (details["has_instructions"], details["has_responses"]) == (True, False)


def test_tokens_are_those_of_the_tokenizer_by_role(shared: Service) -> None:
    tokenizer: Any = shared.parts.catalogue.default.tokenizer

    def count(*texts: str) -> int:
        return sum(len(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts)

    lines = [
        {"system": "be kind", "instruction": f"what is {n}?", "input": "x" * n, "response": "is it"}
        for n in range(1, 30)
    ]
    found = shared.validate(jsonl(*lines))["token_distribution"]
    prompts = [f"what is {n}?\n\n{'x' * n}" for n in range(1, 30)]
    assert found == {
        "prompt_tokens": count(*prompts) + 29 * count("be kind"),
        "response_tokens": 29 * count("is it"),
    }


# Token counts and repetitions, without a request.


def test_long_texts_are_counted_in_slices(shared: Service) -> None:
    tokenizer: Any = shared.parts.catalogue.default.tokenizer
    words = "Fracture of rib and " * (SLICE_CHARACTERS // 4)
    whole = len(tokenizer.encode(words, add_special_tokens=False).ids)
    assert TokenCounter(tokenizer).count(["a", words, "a"])[1] == whole
    assert TokenCounter(tokenizer).count(["x" * (3 * SLICE_CHARACTERS + 1)])[0] > 3


def test_repetitions_are_found_while_the_memory_grows() -> None:
    seen = SeenExamples(expected=0)
    turns: list[list[Any]] = [[{"role": "user", "content": str(number)}] for number in range(9000)]
    assert [seen.add(one) for one in turns] == [False] * 9000
    assert all(seen.add(one) for one in turns)
    seen.close()
