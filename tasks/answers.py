"""Answers of deployments to the same prompts, for the smoke test and the exact-match evaluation.

Greedy, several at once, tried again as the client would: error rates are the canary's matter. Prompts and completions
stay in memory; nothing of them is logged, stored or shown.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import api
from tasks.progress import report
from tuneship.client import ApiError, Client, DeadlineExceeded, ServiceUnreachable
from tuneship.contract.generation import Generate
from tuneship.gates.training_gates import SmokeAnswer

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
    """For each deployment one greedy answer for each prompt, in order. A refusal is one with its status (0: none came).

    Each prompt is asked of all before the next one, so that a moment in which the machine is slow meets them alike.
    What is asked after the deadline has no answer.
    """
    client = api(deadline_s).with_options(tries=1)
    questions = [(one, prompt) for prompt in prompts for one in deployment_ids]

    def ask(question: tuple[str, str]) -> SmokeAnswer:
        return _answer(client, *question, max_tokens)

    answers: list[SmokeAnswer] = []
    with ThreadPoolExecutor(in_flight) as pool:
        for answer in pool.map(ask, questions):
            answers.append(answer)
            report(purpose, len(answers), len(questions))
    return [answers[place :: len(deployment_ids)] for place in range(len(deployment_ids))]


def _answer(client: Client, deployment_id: str, prompt: str, max_tokens: int) -> SmokeAnswer:
    """As often as the client would try; the time is that of the last try, without the pauses between."""
    answer = _ask_once(client, deployment_id, prompt, max_tokens)
    for attempt in range(1, TRIES):
        if not isinstance(answer, Again):
            return answer
        time.sleep(answer.after_seconds or FIRST_PAUSE_SECONDS * 2**attempt)
        answer = _ask_once(client, deployment_id, prompt, max_tokens)
    return SmokeAnswer(status=answer.status) if isinstance(answer, Again) else answer


@dataclass(frozen=True)
class Again:
    """A failure that the same request may not meet again."""

    status: int
    after_seconds: float | None = None


def _ask_once(
    client: Client, deployment_id: str, prompt: str, max_tokens: int
) -> SmokeAnswer | Again:
    started = time.monotonic()
    request = Generate(prompt=prompt, max_tokens=max_tokens, temperature=0.0)
    try:
        generation = client.deployments.generate(deployment_id, request)
    except ApiError as error:
        again = Again(error.status, error.retry_after)
        return again if error.retryable else SmokeAnswer(status=error.status)
    except DeadlineExceeded:
        return SmokeAnswer(status=0)
    except ServiceUnreachable:
        return Again(status=0)
    return SmokeAnswer(
        status=200,
        completion=generation.completion,
        finish_reason=generation.finish_reason,
        output_tokens=generation.usage.completion_tokens,
        latency_ms=(time.monotonic() - started) * 1000.0,
    )
