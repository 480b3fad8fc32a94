"""Answers of one deployment to a list of prompts, for the smoke test and the exact-match evaluation.

Greedy, several at once, with the client's retries: error rates are the canary's matter. Prompts and completions stay in
memory; nothing of them is logged, stored or shown.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.api import api
from tasks.progress import report
from tuneship.client import ApiError, Client, ServiceUnreachable
from tuneship.contract.generation import Generate
from tuneship.gates.training import SmokeAnswer

TRIES = 6
IN_FLIGHT = 16


@task(cache_policy=NO_CACHE, persist_result=False, task_run_name="{purpose}-{deployment_id}")
def answer_prompts(
    deployment_id: str, prompts: Sequence[str], max_tokens: int, purpose: str
) -> list[SmokeAnswer]:
    """One greedy answer for each prompt, in order; a refusal is an answer with its status (0: none came)."""
    client = api().with_options(tries=TRIES)

    def ask(prompt: str) -> SmokeAnswer:
        return _answer(client, deployment_id, prompt, max_tokens)

    answers: list[SmokeAnswer] = []
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for answer in pool.map(ask, prompts):
            answers.append(answer)
            report(purpose, len(answers), len(prompts), deployment_id)
    return answers


def _answer(client: Client, deployment_id: str, prompt: str, max_tokens: int) -> SmokeAnswer:
    started = time.monotonic()
    request = Generate(prompt=prompt, max_tokens=max_tokens, temperature=0.0)
    try:
        generation = client.deployments.generate(deployment_id, request)
    except ApiError as error:
        return SmokeAnswer(status=error.status)
    except ServiceUnreachable:
        return SmokeAnswer(status=0)
    return SmokeAnswer(
        status=200,
        completion=generation.completion,
        finish_reason=generation.finish_reason,
        output_tokens=generation.usage.completion_tokens,
        latency_ms=(time.monotonic() - started) * 1000.0,
    )
