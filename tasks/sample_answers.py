"""Answers of deployments to the same prompts, for the smoke test and the exact-match evaluation.

Generation is greedy, several prompts run at once, and failures are retried as the client would: error rates are judged
by the canary. Prompts and completions stay in memory; nothing of them is logged, stored or shown.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from prefect import task
from prefect.cache_policies import NO_CACHE

from tuneship.client import ApiError, Client, DeadlineExceeded, ServiceUnreachable
from tuneship.contract.generation import Generate
from tuneship.gates.smoke_test import SmokeAnswer
from tuneship.prefect.connection import api
from tuneship.prefect.progress import report

TRIES = 6
FIRST_PAUSE_SECONDS = 0.1
ANSWERS_DEADLINE_S = 3600.0


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{purpose}")
def answer_prompts(
    deployment_ids: Sequence[str],
    prompts: Sequence[str],
    max_tokens: int,
    *,
    purpose: str,
    in_flight: int,
    deadline_s: float = ANSWERS_DEADLINE_S,
) -> list[list[SmokeAnswer]]:
    """One list per deployment with its greedy answer to each prompt, in order.

    A failed request has its HTTP status, or 0 when no answer came or the deadline had passed. Each prompt goes to all
    deployments before the next prompt does, so that a slow moment of the machine affects them alike.
    """
    client = api(deadline_s).with_options(tries=1)
    questions = [(name, prompt) for prompt in prompts for name in deployment_ids]

    ask = partial(_answer, client, max_tokens)
    answers: list[SmokeAnswer] = []
    with ThreadPoolExecutor(in_flight) as pool:
        for answer in pool.map(ask, questions):
            answers.append(answer)
            report(purpose, len(answers), len(questions))
    return [answers[index :: len(deployment_ids)] for index in range(len(deployment_ids))]


def _answer(client: Client, max_tokens: int, question: tuple[str, str]) -> SmokeAnswer:
    """Ask with the client's number of tries. The latency is that of the last try, without the pauses."""
    # Retried here and not by the client, because its own retries would count into the latency.
    answer = _ask_once(client, *question, max_tokens)
    for attempt in range(1, TRIES):
        if not isinstance(answer, RetryableFailure):
            return answer
        time.sleep(answer.after_seconds or FIRST_PAUSE_SECONDS * 2**attempt)
        answer = _ask_once(client, *question, max_tokens)
    return SmokeAnswer(status=answer.status) if isinstance(answer, RetryableFailure) else answer


@dataclass(frozen=True)
class RetryableFailure:
    """A failed request that may succeed when it is repeated."""

    status: int
    after_seconds: float | None = None


def _ask_once(
    client: Client, deployment_id: str, prompt: str, max_tokens: int
) -> SmokeAnswer | RetryableFailure:
    started = time.monotonic()
    request = Generate(prompt=prompt, max_tokens=max_tokens, temperature=0.0)
    try:
        generation = client.deployments.generate(deployment_id, request)
    except ApiError as error:
        if error.retryable:
            return RetryableFailure(error.status, error.retry_after)
        return SmokeAnswer(status=error.status)
    except DeadlineExceeded:
        return SmokeAnswer(status=0)
    except ServiceUnreachable:
        return RetryableFailure(status=0)
    return SmokeAnswer(
        status=200,
        completion=generation.completion,
        finish_reason=generation.finish_reason,
        output_tokens=generation.usage.completion_tokens,
        latency_ms=(time.monotonic() - started) * 1000.0,
    )
