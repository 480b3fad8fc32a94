"""Answers of one deployment to a list of prompts, for the smoke test and the exact-match evaluation.

Greedy, several at once, with the client's retries: error rates are the canary's matter. Prompts and completions stay in
memory; nothing of them is logged, stored or shown.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import api
from tasks.progress import report
from tuneship.client import ApiError, Client, ServiceUnreachable
from tuneship.contract.generation import Generate

TRIES = 6
IN_FLIGHT = 16


@dataclass(frozen=True)
class GreedyAnswer:
    """One answer; `status` is 200, the HTTP status of a refusal, or 0 where no answer came."""

    status: int
    completion: str = ""
    finish_reason: str = ""
    completion_tokens: int = 0
    latency_ms: float = 0.0


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{purpose}-{deployment_id}")
def answer_prompts(
    deployment_id: str, prompts: Sequence[str], max_tokens: int, purpose: str = "evaluate"
) -> list[GreedyAnswer]:
    """One greedy answer for each prompt, in order."""
    client = api().with_options(tries=TRIES)

    def ask(prompt: str) -> GreedyAnswer:
        return _answer(client, deployment_id, prompt, max_tokens)

    answers: list[GreedyAnswer] = []
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for answer in pool.map(ask, prompts):
            answers.append(answer)
            report(purpose, len(answers), len(prompts), deployment_id)
    return answers


def _answer(client: Client, deployment_id: str, prompt: str, max_tokens: int) -> GreedyAnswer:
    started = time.monotonic()
    request = Generate(prompt=prompt, max_tokens=max_tokens, temperature=0.0)
    try:
        generation = client.deployments.generate(deployment_id, request)
    except ApiError as error:
        return GreedyAnswer(status=error.status)
    except ServiceUnreachable:
        return GreedyAnswer(status=0)
    return GreedyAnswer(
        status=200,
        completion=generation.completion,
        finish_reason=generation.finish_reason,
        completion_tokens=generation.usage.completion_tokens,
        latency_ms=(time.monotonic() - started) * 1000.0,
    )
