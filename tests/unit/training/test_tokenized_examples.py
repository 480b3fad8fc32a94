"""Tests of which tokens of an example are learnt, and of how an example is cut."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.models.tiny_model import CHAT_TEMPLATE
from tests.support.zoo.tokenizer_kinds import BY_NAME as TOKENIZERS
from tuneship.contract.lines.dataset_lines import Message
from tuneship.prompts.template import PromptTemplate, TemplateFailed
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import load_tokenizer
from tuneship.training.examples.conversation_rows import conversation_rows
from tuneship.training.examples.data_files import carve_out, read_rows
from tuneship.training.examples.tokenized_examples import Encoder, Segment, TokenizedExamples
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.progress_file import TrainingFailed

QWEN2 = TOKENIZERS["qwen2"]
TALK: list[Message] = [
    {"role": "user", "content": "colour?"},
    {"role": "assistant", "content": "red"},
    {"role": "user", "content": "and now?"},
    {"role": "assistant", "content": "blue"},
]
DROPS_EARLIER_ANSWERS = """\
{%- for message in messages -%}
{%- if message['role'] != 'assistant' or loop.last -%}{{ message['content'] }}|{%- endif -%}
{%- endfor -%}"""


@pytest.fixture
def template() -> PromptTemplate:
    return PromptTemplate(CHAT_TEMPLATE, {})


@pytest.fixture
def encoder(tiny_model: Path) -> Encoder:
    text_format = ModelTextFormat.of_base(tiny_model, load_tokenizer(tiny_model))
    return Encoder(text_format, context_length=64, vocabulary=261)


def test_only_what_the_assistant_says_is_learnt(template: PromptTemplate) -> None:
    assert conversation_rows(TALK, template)[0] == [
        Segment("<|user|>colour?<|end|><|assistant|>", is_target=False),
        Segment("red<|end|>", is_target=True),
        Segment("<|user|>and now?<|end|><|assistant|>", is_target=False),
        Segment("blue<|end|>", is_target=True),
    ]


def test_a_turn_of_weight_0_is_read_and_not_learnt(template: PromptTemplate) -> None:
    ignored: list[Message] = [*TALK[:1], {**TALK[1], "weight": 0}, *TALK[2:]]
    assert [
        segment.text for segment in conversation_rows(ignored, template)[0] if segment.is_target
    ] == ["blue<|end|>"]
    rest_ignored: list[Message] = [*TALK[:3], {**TALK[3], "weight": 0}]
    assert [segment.text for segment in conversation_rows(rest_ignored, template)[0]] == [
        "<|user|>colour?<|end|><|assistant|>",
        "red<|end|>",
    ]


def test_a_template_that_drops_earlier_answers_gives_a_row_for_each_turn() -> None:
    template = PromptTemplate(DROPS_EARLIER_ANSWERS, {})
    rows = conversation_rows(TALK, template)
    assert [[segment.text for segment in row] for row in rows] == [
        ["colour?|", "red|"],
        ["colour?|and now?|", "blue|"],
    ]


def test_a_prompt_that_does_not_stand_before_its_answer_is_refused() -> None:
    reasoning = "{% if add_generation_prompt %}<think>{% endif %}"
    template = PromptTemplate(DROPS_EARLIER_ANSWERS + reasoning, {})
    with pytest.raises(TemplateFailed, match="turn 2 differently"):
        conversation_rows(TALK, template)


def test_nothing_after_the_end_token_is_learnt(encoder: Encoder) -> None:
    [row] = encoder.encode([[Segment("a", is_target=False), Segment("b<|end|>\n", is_target=True)]])
    assert (len(row.tokens), row.loss_mask) == (4, [False, True, True, False])


def test_an_end_token_behind_the_whole_conversation_is_not_learnt(encoder: Encoder) -> None:
    [other] = encoder.tokenizer.encode("z").ids
    two_ends = replace(encoder.format, configured_ends=(*encoder.format.stop_tokens, other))
    [row] = replace(encoder, format=two_ends).encode([[Segment("b<|end|>\nz", is_target=True)]])
    assert row.loss_mask == [True, True, False, False]


def test_an_end_that_is_plain_text_is_learnt_whole(tmp_path: Path) -> None:
    """The tokenizer joins its last character with the line break behind it, as those of Llama 3 and Qwen do."""
    rules = json.loads(QWEN2.save(tmp_path, ()).to_str())
    vocabulary, merges = rules["model"]["vocab"], rules["model"]["merges"]
    merges.append([">", "\u010a"])
    vocabulary[">\u010a"] = max(vocabulary.values()) + 100
    (tmp_path / "tokenizer.json").write_text(json.dumps(rules))
    source = CHAT_TEMPLATE.replace("<|end|>", "</end>\n")
    (tmp_path / "chat_template.jinja").write_text(source)
    plain = ModelTextFormat.of_base(tmp_path, load_tokenizer(tmp_path))
    assert plain.stop_text == "</end>"
    encoder = Encoder(plain, context_length=64, vocabulary=2000)
    [row] = encoder.encode(conversation_rows(TALK, plain.template))
    learnt = [token for token, counts in zip(row.tokens, row.loss_mask, strict=True) if counts]
    assert plain.tokenizer.decode(learnt) == "red</end>\nblue</end>\n"


def write(path: Path, *lines: Mapping[str, object]) -> Path:
    path.write_text("\ufeff" + "\n\n".join(json.dumps(line) for line in lines))
    return path


def test_numbers_are_learnt_as_pythons_json_writes_them(encoder: Encoder, tmp_path: Path) -> None:
    numbers = '{"x": 12345678901234567890123456789, "y": 0.1234567890123456789}'
    function = f'{{"name": "f", "arguments": {numbers}}}'
    call = f'{{"role": "assistant", "tool_calls": [{{"function": {function}}}]}}'
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"messages": [{{"role": "user", "content": "a"}}, {call}]}}\n')
    long = replace(encoder, context_length=4096)
    rows = read_rows(path, "conversation", long, SupervisedFineTuning()).rows
    learnt = long.tokenizer.decode(rows.tokens[rows.loss_mask].tolist())
    assert json.dumps(json.loads(numbers)) in learnt


def test_it_is_known_whether_examples_have_functions(encoder: Encoder, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "red"}
    talk = {"messages": [TALK[0], answer], "tools": []}
    function = {"name": "f", "arguments": "{}"}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    sharegpt = [
        {"from": "human", "value": "colour?"},
        {"from": "gpt", "tool_calls": called["tool_calls"]},
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    wide = replace(encoder, context_length=600)
    for number, (line, expected) in enumerate(
        [
            (talk, False),
            ({**talk, "tools": [tool]}, True),
            ({"messages": [TALK[0], called]}, True),
            ({"conversations": sharegpt, "messages": "not read"}, True),
            ({**talk, "messages": [{**TALK[0], "tool_calls": "not read"}, answer]}, False),
        ]
    ):
        path = write(tmp_path / f"{number}.jsonl", talk, line)
        read = read_rows(path, "conversation", wide, SupervisedFineTuning())
        assert (len(read.rows), read.has_tools) == (2, expected)


def test_rows_hold_the_tokens_of_the_rendered_text(encoder: Encoder, tmp_path: Path) -> None:
    """Blank lines and a byte order mark do not count as rows."""
    path = write(
        tmp_path / "a.jsonl",
        *[{"instruction": f"say {word}", "response": word} for word in ("red", "blue")],
    )
    rows = read_rows(path, "instruction", encoder, SupervisedFineTuning()).rows
    assert len(rows) == 2
    second = slice(rows.starts[1], rows.starts[2])
    assert encoder.tokenizer.decode(rows.tokens[second].tolist(), skip_special_tokens=False) == (
        "<|user|>say blue<|end|><|assistant|>blue<|end|>"
    )
    learnt = rows.tokens[second][rows.loss_mask[second]]
    assert encoder.tokenizer.decode(learnt.tolist(), skip_special_tokens=False) == "blue<|end|>"


def test_rows_are_cut_at_the_context_length_or_dropped_when_nothing_is_left(
    encoder: Encoder, tmp_path: Path
) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"instruction": "short", "response": "yes"},
        {"instruction": "short", "response": "y" * 100},
        {"instruction": "l" * 100, "response": "yes"},
    )
    read = read_rows(path, "instruction", encoder, SupervisedFineTuning())
    assert (len(read.rows), read.truncated, read.dropped) == (2, 2, 1)
    assert read.rows.lengths.tolist() == [12, 64]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b'{"instruction": "CANARY", "response": 3}\n', "line 1: wrong_type response"),
        (b'\n{"instruction": "CANARY"\n', "line 2: invalid_json"),
        (b'["CANARY"]\n', "line 1: missing_field instruction"),
        (b"7\n", "line 1: invalid_json"),
        (b"", "no example"),
        (None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_is_reported_by_line_and_never_by_text(
    encoder: Encoder, tmp_path: Path, content: bytes | None, problem: str
) -> None:
    path = tmp_path / "broken.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TrainingFailed) as failure:
        read_rows(path, "instruction", encoder, SupervisedFineTuning())
    assert failure.value.reason == "data_unreadable"
    assert problem in failure.value.message
    assert "CANARY" not in failure.value.message


def some_rows(words: list[int]) -> TokenizedExamples:
    tokens = np.array([number for word in words for number in (word, 9)], dtype=np.int32)
    return TokenizedExamples(
        tokens, np.tile([False, True], len(words)), np.arange(0, 2 * len(words) + 1, 2)
    )


def test_a_tenth_is_set_aside_whatever_the_order_of_the_rows() -> None:
    words = list(range(100, 145))
    learnt, measured = carve_out(some_rows(words))
    assert (len(learnt), len(measured)) == (41, 4)
    assert sorted([*learnt, *measured]) == list(range(45))
    again = carve_out(some_rows(words[::-1]))[1]
    assert {words[::-1][index] for index in again} == {words[index] for index in measured}


def test_at_least_one_row_is_set_aside() -> None:
    learnt, measured = carve_out(some_rows([1, 2]))
    assert (len(learnt), len(measured)) == (1, 1)
