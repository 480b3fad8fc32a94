"""Answers that follow a schema: greedy and sampled, beside free ones in the same batch."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from tests.unit.serving.test_replica import GENERATE, connected
from tuneship.prompts.tool_syntax import CallSyntax
from tuneship.service.generation.call_reader import CallReader
from tuneship.serving.engine import Engine, EngineLimits
from tuneship.serving.models.model import CausalModel
from tuneship.serving.replica import load_model
from tuneship.serving.sampling.grammar import accepts, grammar_of, grammar_of_calls, is_usable
from tuneship.serving.sampling.guides import GrammarCompiler, GrammarRefused
from tuneship.serving.sequence import GenerateRequest, Sequence

TINY = Path(__file__).parents[3] / "tuneship" / "base_models" / "tuneship-tiny"
STOPS = (1,)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"enum": ["red", "green", 3, None]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1, "maximum": 20}]},
    {"type": "string", "format": "date"},
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
    {
        "$ref": "#/$defs/pair",
        "$defs": {
            "pair": {
                "type": "array",
                "prefixItems": [{"const": 1}, {"type": "boolean"}],
                "items": False,
                "minItems": 2,
            }
        },
    },
]


@cache
def model() -> CausalModel:
    return load_model(TINY)


def engine() -> tuple[Engine, GrammarCompiler]:
    return Engine(model(), EngineLimits()), GrammarCompiler(TINY, model().facts.vocabulary)


def run(engine: Engine) -> tuple[dict[str, list[int]], dict[str, str]]:
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    while not engine.idle:
        result = engine.step()
        assert not result.failed
        for name, token in result.tokens:
            tokens.setdefault(name, []).append(token)
        reasons.update({name: str(reason) for name, reason in result.finished})
    return tokens, reasons


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_answer_of_a_mixed_batch_fits_its_schema_or_is_cut_by_its_length(
    temperature: float,
) -> None:
    decode = Tokenizer.from_file(str(TINY / "tokenizer.json")).decode
    alone, compiler = engine()
    free = GenerateRequest(tokens=(5, 6, 7), max_tokens=20, temperature=temperature, seed=3)
    alone.submit("free", free)
    expected = run(alone)[0]["free"]

    mixed, _ = engine()
    mixed.submit("free", free)
    for number, schema in enumerate(SCHEMAS):
        grammar = grammar_of(schema)
        request = GenerateRequest(
            tokens=(5, 6, 8 + number),
            max_tokens=200,
            temperature=temperature,
            seed=number,
            stop_tokens=STOPS,
            grammar=grammar,
        )
        mixed.submit(str(number), request, compiler.guide(grammar, STOPS))
    tokens, reasons = run(mixed)
    assert tokens["free"] == expected
    for number, schema in enumerate(SCHEMAS):
        text = decode(tokens[str(number)])
        assert reasons[str(number)] == "stop", text
        jsonschema.validate(json.loads(text), schema)
        assert accepts(grammar_of(schema), text)


# Schemas of objects, in which a small model once wrote up to three times as much white space as JSON.
PADDED = [
    {"kind": {"type": "boolean"}},
    {"chapter": {"type": "string", "maxLength": 40}, "is_chronic": {"type": "boolean"}},
    {
        "codes": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "maxItems": 6,
        }
    },
    {"color": {"enum": ["red", "green"]}, "size": {"enum": [1, 2, 3]}, "none": {"type": "null"}},
    {
        "person": {"type": "object", "properties": {"name": {"enum": ["Ada", "Bo"]}}},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
]


@pytest.mark.parametrize("form", ["answer", "call"])
def test_a_model_that_has_seen_little_json_does_not_pad_it(form: str) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    syntax = CallSyntax('<tool_call>{"name": "', '", "arguments": ', None, "}</tool_call>")
    one, compiler = engine()
    for number, properties in enumerate(PADDED):
        schema = {
            "type": "object",
            "properties": properties,
            "required": [*properties],
            "additionalProperties": False,
        }
        grammar = grammar_of(schema)
        if form == "call":
            grammar = grammar_of_calls(
                syntax, {"look_up": schema}, {}, otherwise=None, is_parallel=False
            )
        request = GenerateRequest(
            tokens=tuple(tokenizer.encode(f"<|user|>{number} as JSON<|assistant|>").ids),
            max_tokens=250,
            stop_tokens=STOPS,
            grammar=grammar,
        )
        one.submit(str(number), request, compiler.guide(grammar, STOPS))
    answers, reasons = run(one)
    for number, tokens in answers.items():
        text = tokenizer.decode(tokens)
        assert reasons[number] == "stop", text
        written = text.removeprefix(syntax.begin + "look_up" + syntax.middle)
        start = text.removesuffix(written)
        value = json.loads(written.removesuffix(syntax.end) if start else written)
        compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        assert compact in text
        least = start + compact + (syntax.end if start else "")
        assert len(tokens) <= 1.15 * len(tokenizer.encode(least).ids)


@pytest.mark.parametrize(
    "text", ['{"name": "a, b:c", "age": 5}', '{"name":"a, b:c","age":5}'], ids=["spaced", "compact"]
)
def test_a_model_writes_json_in_the_spelling_that_it_has_learnt(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    guide = GrammarCompiler(TINY, model().facts.vocabulary).guide(grammar_of(PERSON), STOPS)
    for token in tokenizer.encode(text).ids:
        assert not guide.is_complete
        logits = torch.zeros(model().facts.vocabulary)
        logits[token] = 1.0
        guide.restrict(logits)
        assert int(logits.argmax()) == token
        guide.take(token)
    assert guide.is_complete
    assert not guide.has_failed


@pytest.mark.parametrize("mark", ["<tool_call>", "<|user|>"])
@pytest.mark.parametrize("otherwise", ["text", None])
def test_an_answer_calls_functions_also_where_their_mark_is_a_special_token(
    mark: str, otherwise: str | None
) -> None:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    special = {"<|user|>": tokenizer.token_to_id("<|user|>")}
    between = '"}\n' + mark + '{"name": "'
    syntax = CallSyntax(mark + '{"name": "', '", "arguments": ', between, "}\n")
    functions = {"look_up": PERSON, "list": {"type": "object", "additionalProperties": False}}
    grammar = grammar_of_calls(syntax, functions, special, otherwise=otherwise, is_parallel=False)
    one, compiler = engine()
    for number in range(6):
        request = GenerateRequest(
            tokens=(5, 6, 8 + number),
            max_tokens=120,
            temperature=1.0,
            seed=number,
            stop_tokens=STOPS,
            grammar=grammar,
        )
        one.submit(str(number), request, compiler.guide(grammar, STOPS))
    answers, reasons = run(one)
    for name, tokens in answers.items():
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        assert mark not in special or (special[mark] in tokens) == (mark in text)
        reader = CallReader(syntax, is_text_before=True, needs_call=otherwise is None)
        reader.feed(text, is_last=True)
        assert otherwise is not None or reader.calls
        for call in reader.calls if reasons[name] == "stop" else ():
            jsonschema.validate(
                json.loads(call.function.arguments), functions[call.function.name or ""]
            )
        assert reader.is_complete or reasons[name] == "length"


def test_a_mask_changes_no_bit_of_the_other_rows_and_no_log_probability() -> None:
    one, compiler = engine()
    grammar = grammar_of({"enum": ["red"]})
    free = GenerateRequest(tokens=(5, 6, 7), max_tokens=9, temperature=1.0, seed=3, logprobs=2)
    guided = replace(free, tokens=(5, 6, 8), stop_tokens=STOPS, grammar=grammar)
    one.submit("free", free)
    one.submit("guided", guided, compiler.guide(grammar, STOPS))
    restricted: list[tuple[torch.Tensor, torch.Tensor]] = []
    restrict = one._restrict

    def noting(logits: torch.Tensor, sequences: list[Sequence]) -> None:
        before = logits.clone()
        restrict(logits, sequences)
        restricted.append((before, logits.clone()))

    one._restrict = noting
    scores = one.step().scores
    ((before, after),) = restricted
    assert torch.equal(before[0], after[0])
    assert int(torch.isfinite(after[1]).sum()) < int(torch.isfinite(before[1]).sum())
    for row, (_, score) in enumerate(scores):
        expected = before[row].log_softmax(-1)
        assert score.logprob == pytest.approx(float(expected[score.token]), abs=1e-5)
        likeliest = [token for token, _ in score.top]
        assert likeliest == expected.topk(2).indices.tolist()


def test_an_answer_that_is_cut_says_length() -> None:
    one, compiler = engine()
    grammar = grammar_of({"type": "string", "minLength": 500})
    request = GenerateRequest(tokens=(5,), max_tokens=9, stop_tokens=STOPS, grammar=grammar)
    one.submit("a", request, compiler.guide(grammar, STOPS))
    tokens, reasons = run(one)
    assert reasons == {"a": "length"}
    assert len(tokens["a"]) == 9


def test_a_grammar_that_becomes_too_complex_ends_its_own_answer_only() -> None:
    one, compiler = engine()
    # The parser follows 2,000 branches at once, and needs them only at the list's first item.
    items = [
        {"type": "object", "properties": {"x": {"enum": [n]}, "y": {}, "z": {}}} for n in range(300)
    ]
    grammar = grammar_of({"type": "array", "minItems": 1, "items": {"anyOf": items}})
    assert is_usable(grammar)
    request = GenerateRequest(tokens=(5,), max_tokens=60, stop_tokens=STOPS, grammar=grammar)
    one.submit("guided", request, compiler.guide(grammar, STOPS))
    one.submit("free", GenerateRequest(tokens=(5, 6), max_tokens=60))
    unfollowed: list[str] = []
    finished: list[str] = []
    while not one.idle:
        result = one.step()
        unfollowed += result.unfollowed
        finished += [name for name, _ in result.finished]
    assert (unfollowed, finished) == (["guided"], ["free"])


def test_a_finished_or_cancelled_answer_leaves_no_guide_behind() -> None:
    one, compiler = engine()
    grammar = grammar_of(PERSON)
    request = GenerateRequest(tokens=(5,), max_tokens=9, stop_tokens=STOPS, grammar=grammar)
    one.submit("a", request, compiler.guide(grammar, STOPS))
    one.cancel("a")
    one.submit("b", request, compiler.guide(grammar, STOPS))
    run(one)
    assert one._guides == {}


@pytest.mark.parametrize(
    "schema", [{"not": {}}, {"type": "array", "uniqueItems": True}, {"$ref": "http://a/b"}]
)
def test_a_guide_that_cannot_be_followed_is_not_usable(schema: dict[str, object]) -> None:
    assert not is_usable(grammar_of(schema))
    with pytest.raises(GrammarRefused):
        engine()[1].guide(grammar_of(schema), STOPS)


def test_a_name_has_one_spelling_only() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert accepts(grammar_of(schema), '{"a": 1}')
    assert not accepts(grammar_of(schema), '{"\\u0061": "x"}')


def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GrammarRefused):
        GrammarCompiler(tmp_path, 10).guide(grammar_of({}), STOPS)


@pytest.mark.slow
def test_a_replica_compiles_grammars_beside_its_steps_and_refuses_bad_ones() -> None:
    with connected(TINY) as wire:
        wire.receive()
        ask = {**GENERATE, "max_tokens": 50, "stop_tokens": STOPS}
        wire.send(**ask, id="good", grammar=grammar_of({"enum": ["red"]}))
        answers: list[int] = []
        finished: list[list[str]] = []
        while not finished:
            frame = wire.receive()
            answers += [token for _, token in frame["tokens"]]
            finished = frame["finished"]
        assert finished == [["good", "stop"]]
        decode = Tokenizer.from_file(str(TINY / "tokenizer.json")).decode
        assert json.loads(decode(answers)) == "red"

        wire.send(**ask, id="bad", grammar=grammar_of({"not": {"const": "planted"}}))
        refusal = wire.receive()
        assert refusal["id"] == "bad"
        assert refusal["grammar"]
        assert "planted" not in refusal["error"]
