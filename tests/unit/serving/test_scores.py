"""Log probabilities are those of transformers' forward pass, for new tokens and for prompts, in any batch."""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.serving.conftest import StartReplica
from tests.unit.serving.test_engine import build
from tuneship.serving.engine import Engine, EngineLimits, RequestRefused
from tuneship.serving.models.generic import GenericModel
from tuneship.serving.sampling.scores import LEAST_LOGPROB, scores_of
from tuneship.serving.sequence import GenerateRequest, TokenScore

# Sums of float32 in another order; with AVX-512, 2.003e-5 was seen in one of thousands.
TOLERANCE = 5e-5
TOP = 5


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
    finish: str = ""


def answers(
    engine: Engine, requests: Iterable[GenerateRequest], joining: int = 1000
) -> list[Answer]:
    arriving = list(enumerate(requests))
    found = [Answer() for _ in arriving]
    while arriving or not engine.idle:
        for number, request in arriving[:joining]:
            engine.submit(str(number), request)
        del arriving[:joining]
        result = engine.step()
        assert not result.failed
        for name, token in result.tokens:
            found[int(name)].tokens.append(token)
        for name, score in result.scores:
            found[int(name)].scores.append(score)
        for name, together in result.prompt_scores:
            found[int(name)].prompt_scores += together
        for name, reason in result.finished:
            found[int(name)].finish = reason
    return found


def reference_logprobs(reference: Any, tokens: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits = reference(input_ids=torch.tensor([tokens])).logits[0].float()
    return logits.log_softmax(-1)


def check(reference: Any, request: GenerateRequest, answer: Answer) -> None:
    """Compare every score with the log-softmax of one forward pass over prompt and answer."""
    logprobs = reference_logprobs(reference, [*request.tokens, *answer.tokens])
    length = len(request.tokens)
    if request.logprobs is None:
        assert answer.scores == []
    else:
        assert [score.token for score in answer.scores] == answer.tokens
        compare(logprobs[length - 1 : -1], answer.scores, request.logprobs)
    if request.prompt_logprobs is None:
        assert answer.prompt_scores == []
    else:
        assert tuple(score.token for score in answer.prompt_scores) == request.tokens[1:]
        compare(logprobs[: length - 1], answer.prompt_scores, request.prompt_logprobs)


def compare(expected: torch.Tensor, found: Sequence[TokenScore], top: int) -> None:
    for row, score in zip(expected, found, strict=True):
        assert score.logprob == pytest.approx(float(row[score.token]), abs=TOLERANCE)
        likeliest = row.topk(top).values.tolist()
        assert [value for _, value in score.top] == pytest.approx(likeliest, abs=TOLERANCE)
        named = [float(row[int(token)]) for token, _ in score.top]
        assert named == pytest.approx(likeliest, abs=TOLERANCE)


def drawn_requests(seed: int, count: int = 20) -> list[GenerateRequest]:
    draws = random.Random(seed)  # noqa: S311 (test data)
    return [
        GenerateRequest(
            tuple(draws.randrange(5, 261) for _ in range(draws.randrange(1, 70))),
            max_tokens=draws.randrange(0, 12),
            adapter=draws.choice([None, "wide", "narrow"]),
            temperature=draws.choice([0.0, 0.7, 2.0]),
            seed=draws.randrange(100),
            logprobs=draws.choice([None, 0, 3]),
            prompt_logprobs=draws.choice([None, None, 0, TOP]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("joining", "prompt_tokens"), [(1, 2000), (1000, 2000), (3, 11)])
def test_scores_in_a_mixed_batch_are_those_of_transformers(
    base: Path,
    adapters: Mapping[str, Path],
    references: Mapping[str | None, Any],
    joining: int,
    prompt_tokens: int,
) -> None:
    engine = build(base, adapters, rows=6, prompt_tokens=prompt_tokens)
    requests = drawn_requests(joining)
    for request, answer in zip(requests, answers(engine, requests, joining), strict=True):
        check(references[request.adapter], request, answer)


def test_a_step_computes_few_logits_of_prompts_at_once(
    base: Path,
    adapters: Mapping[str, Path],
    references: Mapping[str | None, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = build(base, {}, rows=6)
    limit = 16
    monkeypatch.setattr(
        "tuneship.serving.engine.PROMPT_LOGITS", limit * engine._model.facts.vocabulary
    )
    engine = build(base, adapters, rows=6)
    rows: list[int] = []
    forward = engine._model.forward
    monkeypatch.setattr(
        engine._model,
        "forward",
        lambda *inputs: rows.append(len(inputs[0].logit_indices)) or forward(*inputs),
    )
    requests = [replace(one, max_tokens=1) for one in drawn_requests(7)]
    for request, answer in zip(requests, answers(engine, requests), strict=True):
        check(references[request.adapter], request, answer)
    assert max(rows) <= limit + 6 + 1
    assert max(len(one.tokens) for one in requests if one.prompt_logprobs is not None) > 2 * limit


def test_a_cached_prefix_takes_no_score_from_a_prompt(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=4)
    plain = GenerateRequest(tuple(range(10, 60)), max_tokens=2)
    scored = replace(plain, prompt_logprobs=1, logprobs=1)
    for request in (plain, scored, plain, scored):
        (answer,) = answers(engine, [request])
        check(references[None], request, answer)
    assert engine.stats()["reused_tokens"] == len(plain.tokens) - 1


def test_a_stop_token_is_scored_and_not_answered(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=2)
    free = GenerateRequest((10, 20, 30), max_tokens=6, logprobs=2)
    (whole,) = answers(engine, [free])
    stop = whole.tokens[-1]
    (stopped,) = answers(engine, [replace(free, stop_tokens=(stop,))])
    end = whole.tokens.index(stop)
    assert (stopped.tokens, stopped.finish) == (whole.tokens[:end], "stop")
    assert [score.token for score in stopped.scores] == whole.tokens[: end + 1]


def test_a_prompt_is_only_read_when_no_token_is_wanted(
    base: Path, references: Mapping[str | None, Any]
) -> None:
    engine = build(base, {}, rows=2)
    context = engine._model.facts.context_length
    full = GenerateRequest(tuple(7 + n % 200 for n in range(context)), 0, prompt_logprobs=0)
    (answer,) = answers(engine, [full])
    assert (answer.tokens, answer.finish) == ([], "length")
    check(references[None], full, answer)
    with pytest.raises(RequestRefused, match="prompt tokens"):
        engine.submit("longer", replace(full, tokens=(*full.tokens, 7)))
    with pytest.raises(RequestRefused, match="prompt tokens"):
        engine.submit("no room", replace(full, max_tokens=1))
    with pytest.raises(RequestRefused, match="max_tokens"):
        engine.submit("negative", GenerateRequest((7, 8), -1))


def test_a_model_of_transformers_itself_scores_alike(
    base: Path, adapters: Mapping[str, Path], references: Mapping[str | None, Any]
) -> None:
    engine = Engine(GenericModel(base), EngineLimits(slots=6, prompt_tokens=30))
    for name, path in adapters.items():
        engine.load(name, path)
    requests = drawn_requests(3, count=8)
    for request, answer in zip(requests, answers(engine, requests), strict=True):
        check(references[request.adapter], request, answer)


def test_a_cancelled_prompt_of_many_steps_leaves_room(base: Path) -> None:
    engine = build(base, {}, rows=2, prompt_tokens=4)
    engine.submit("a", GenerateRequest(tuple(range(5, 105)), 3, prompt_logprobs=2))
    engine.step()
    engine.cancel("a")
    assert engine.idle
    (answer,) = answers(engine, [GenerateRequest((9, 9), 2)])
    assert len(answer.tokens) == 2


def test_an_impossible_token_has_the_least_logprob_instead_of_minus_infinity() -> None:
    logits = torch.tensor([[0.0, float("-inf"), 0.0]])
    (score,) = scores_of(logits, [1], [3])
    assert score.logprob == LEAST_LOGPROB
    assert score.top[2] == (1, LEAST_LOGPROB)
    assert scores_of(logits, [0], [0])[0].top == []


def test_scores_pass_the_socket_of_a_replica(
    start_replica: StartReplica, references: Mapping[str | None, Any]
) -> None:
    request = GenerateRequest(
        tuple(7 + n % 200 for n in range(250)), 4, logprobs=2, prompt_logprobs=20
    )

    async def talk() -> tuple[Answer, Answer]:
        async with start_replica() as process:
            streams = [
                process.line.generate(one)
                for one in (request, replace(request, logprobs=None, prompt_logprobs=None))
            ]
            found = [Answer(await one.read_all(), one.scores, one.prompt_scores) for one in streams]
            return found[0], found[1]

    scored, plain = asyncio.run(talk())
    check(references[None], request, scored)
    assert plain == Answer(scored.tokens)
