"""`n`, log probabilities, echo and prompts without a template, as programs of the `openai` package see them."""

import math
from typing import Any

import openai
import pytest

from tests.service.openai.conftest import ENDPOINT
from tests.support.openai.openai_clients import blocking
from tests.support.service.in_process import ANSWER, Service

MESSAGES: Any = [{"role": "user", "content": "senile cataract"}]
TEXT = "Grüße: senile cataract"


@pytest.fixture
def lenient(answering: Service) -> Any:
    """A client that takes a null in a list of numbers, as OpenAI sends it with `echo`."""
    with blocking(answering, _strict_response_validation=False) as client:
        yield client


def asked(service: Service, count: int) -> list[dict[str, Any]]:
    """The newest requests that reached a replica."""
    return service.engines.asked[-count:]


def test_several_answers_have_the_next_seeds_and_count_the_prompt_once(
    client: openai.OpenAI, answering: Service
) -> None:
    one = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES)
    three = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, n=3, seed=7)
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert {choice.message.content for choice in three.choices} == {ANSWER}
    assert sorted(frame["seed"] for frame in asked(answering, 3)) == [7, 8, 9]
    assert one.usage is not None
    assert three.usage is not None
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens == 3 * one.usage.completion_tokens


def test_chat_tells_the_logprobs_of_its_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=ENDPOINT, messages=MESSAGES, logprobs=True, top_logprobs=3
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert "".join(token.token for token in found.content) == ANSWER
    assert b"".join(bytes(token.bytes or ()) for token in found.content) == ANSWER.encode()
    logprobs = [token.logprob for token in found.content]
    assert logprobs == [-(number + 1) / 8 for number in range(len(logprobs))]
    assert all(len(token.top_logprobs) == 3 for token in found.content)
    assert answer.usage is not None
    assert len(logprobs) == answer.usage.completion_tokens

    alone = client.chat.completions.create(model=ENDPOINT, messages=MESSAGES, logprobs=True)
    assert alone.choices[0].logprobs is not None
    assert alone.choices[0].logprobs.content is not None
    assert all(not token.top_logprobs for token in alone.choices[0].logprobs.content)


def test_a_stream_of_several_answers_tells_its_logprobs_by_index(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=ENDPOINT, messages=MESSAGES, n=2, logprobs=True, stream=True
        )
    )
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == ANSWER
        tokens = [
            token.token
            for choice in own
            if choice.logprobs is not None
            for token in choice.logprobs.content or ()
        ]
        assert "".join(tokens) == ANSWER
        assert [choice.finish_reason for choice in own if choice.finish_reason] == ["stop"]


def test_a_stop_text_takes_its_tokens_from_the_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=ENDPOINT, messages=MESSAGES, logprobs=True, stop=" the"
    )
    choice = answer.choices[0]
    assert choice.message.content == "Diseases of"
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert "".join(token.token for token in choice.logprobs.content) == "Diseases of"


def test_a_completion_continues_its_text_without_a_template(
    client: openai.OpenAI, answering: Service
) -> None:
    client.completions.create(model=ENDPOINT, prompt=TEXT)
    (as_text,) = asked(answering, 1)
    client.completions.create(model=ENDPOINT, prompt=as_text["tokens"])
    (as_ids,) = asked(answering, 1)
    assert as_ids["tokens"] == as_text["tokens"]
    client.completions.create(model=ENDPOINT, prompt="<|user|>x")
    (special,) = asked(answering, 1)
    assert special["tokens"][0] == 3, "a special token of the model is read as one"


@pytest.mark.parametrize("is_ids", [False, True])
def test_several_prompts_are_answered_in_their_order(
    client: openai.OpenAI, answering: Service, is_ids: bool
) -> None:
    prompts: Any = [[40, 41], [42, 43, 44]] if is_ids else ["senile", "cataract of the eye"]
    answer = client.completions.create(model=ENDPOINT, prompt=prompts, n=2, max_tokens=32)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in answer.choices} == {ANSWER}
    frames = asked(answering, 4)
    lengths = sorted(len(frame["tokens"]) for frame in frames)
    assert lengths[0] == lengths[1] < lengths[2] == lengths[3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == lengths[0] + lengths[2]


def test_the_logprobs_of_a_completion_are_lists_that_end_with_the_stop_token(
    client: openai.OpenAI,
) -> None:
    answer = client.completions.create(model=ENDPOINT, prompt=TEXT, max_tokens=32, logprobs=2)
    choice = answer.choices[0]
    assert choice.text == ANSWER
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert "".join(found.tokens) == ANSWER + "<|end|>"
    for token, offset in list(zip(found.tokens, found.text_offset, strict=True))[:-1]:
        assert ANSWER[offset : offset + len(token)] == token
    assert found.text_offset[-1] == len(ANSWER)
    assert found.token_logprobs == [-(n + 1) / 8 for n in range(len(found.tokens))]
    assert found.top_logprobs is not None
    assert all(2 <= len(likely) <= 3 for likely in found.top_logprobs)


def test_a_streamed_completion_has_the_same_logprobs(client: Any, lenient: openai.OpenAI) -> None:
    options: Any = {"model": ENDPOINT, "prompt": TEXT, "max_tokens": 32, "logprobs": 2}
    whole = client.completions.create(**options).choices[0].logprobs
    pieces = [
        piece.choices[0].logprobs
        for piece in lenient.completions.create(**options, stream=True)
        if piece.choices[0].logprobs is not None
    ]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [one for piece in pieces for one in getattr(piece, name)]
        assert joined == getattr(whole, name), name


@pytest.mark.parametrize("most", [0, 1])
def test_an_echo_tells_the_logprobs_of_the_prompt(
    lenient: openai.OpenAI, answering: Service, most: int
) -> None:
    """As lm-evaluation-harness asks for them, for the tokens of a choice behind those of a question."""
    ids = [3, *range(40, 60)]
    answer = lenient.completions.create(
        model=ENDPOINT, prompt=[ids], max_tokens=most, logprobs=1, echo=True, temperature=0
    )
    choice = answer.choices[0]
    found: Any = choice.logprobs
    assert len(found.tokens) == len(ids) + most
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.token_logprobs[1 : len(ids)] == [-1.0] * (len(ids) - 1)
    assert choice.text == "".join(found.tokens)
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == most
    assert asked(answering, 1)[0]["prompt_logprobs"] == 1


def test_an_echoed_text_is_as_it_was_sent(client: openai.OpenAI, lenient: openai.OpenAI) -> None:
    answer = client.completions.create(model=ENDPOINT, prompt=TEXT, max_tokens=32, echo=True)
    assert answer.choices[0].text == TEXT + ANSWER
    assert answer.choices[0].logprobs is None
    alone = client.completions.create(model=ENDPOINT, prompt=TEXT, max_tokens=0, echo=True)
    assert (alone.choices[0].text, alone.choices[0].logprobs) == (TEXT, None)
    scored = lenient.completions.create(
        model=ENDPOINT, prompt=TEXT, max_tokens=0, echo=True, logprobs=0, n=2
    )
    for choice in scored.choices:
        found: Any = choice.logprobs
        assert choice.text == TEXT
        assert found.text_offset[0] == 0
        assert found.text_offset[-1] < len(TEXT)
        assert math.fsum(found.token_logprobs[1:]) == 1 - len(found.tokens)
