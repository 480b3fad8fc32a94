"""A long answer is the same JSON as a short one, written in pieces."""

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import TypeAdapter

from tuneship.contract.generation import (
    GeneratedChoice,
    Generation,
    LikelyToken,
    TokenLogprob,
    Usage,
)
from tuneship.contract.metrics import LatencySeries
from tuneship.contract.openai.completions import TextLogprobs
from tuneship.service.answers.long_answers import dumped, dumped_frame, is_long


def answered(tokens: int, choices: int) -> Generation:
    top = [LikelyToken(id=n, token="é", bytes=[195, 169], logprob=-n / 7) for n in range(20)]
    scores = [TokenLogprob(id=1, token="a", bytes=[97], logprob=None, top=top)] * tokens
    one = GeneratedChoice(completion='a "b"\n', finish_reason="stop", logprobs=scores)
    usage = Usage(prompt_tokens=1, completion_tokens=2, total_tokens=3)
    return Generation(
        id="gen-1",
        deployment_id="dep-1",
        completion="a",
        finish_reason="stop",
        choices=[one] * choices,
        usage=usage,
    )


def written_at_once(answer: Any) -> Any:
    return json.loads(TypeAdapter(type(answer)).dump_json(answer, by_alias=True))


def test_a_short_answer_is_not_long() -> None:
    assert not is_long(answered(10, 2))
    assert not is_long(None)


def test_a_long_answer_is_written_in_pieces() -> None:
    for answer in (answered(300, 3), answered(9, 300)):
        assert is_long(answer)
        assert json.loads(dumped(TypeAdapter(Generation), answer)) == written_at_once(answer)
        assert json.loads(dumped_frame(answer)) == written_at_once(answer)


def test_long_lists_of_plain_values_are_written_in_pieces() -> None:
    likeliest: list[dict[str, float] | None] = [None, {"a": -1.5, '"': float("-inf")}]
    answer = TextLogprobs(
        tokens=["é", "\n"] * 2_000,
        token_logprobs=[None, -1e-7] * 2_000,
        top_logprobs=likeliest * 2_000,
        text_offset=[0, 1] * 2_000,
    )
    assert json.loads(dumped(TypeAdapter(TextLogprobs), answer)) == written_at_once(answer)


def test_long_lists_whose_values_have_a_form_of_their_own_keep_it() -> None:
    times = [datetime(2026, 1, 2, 3, 4, 5, 678_901, tzinfo=UTC), None] * 6_000
    answer = LatencySeries(timestamps=times, p50=[1.5, None] * 6_000)
    for written in (dumped(TypeAdapter(LatencySeries), answer), dumped_frame(answer)):
        assert json.loads(written) == written_at_once(answer)
    assert json.loads(written)["timestamps"][0] == "2026-01-02T03:04:05Z"


def test_one_long_text_counts_by_its_characters() -> None:
    assert is_long({"text": "a" * 1_000_000})
    assert not is_long({"at": datetime.now(UTC), "text": "a" * 1_000})
