"""The requests of an evaluation: each asks one deployment for its answer to one example, or how likely it finds one.

An answer is graded right after it was given, and only its scores are stored.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuneship.contract.errors import ApiError
from tuneship.contract.generation import Generate
from tuneship.contract.lines.dataset_lines import Message
from tuneship.evaluation.graders import AnswerToScore
from tuneship.evaluation.items import EvaluationItem
from tuneship.evaluation.likelihoods import Likelihood
from tuneship.evaluation.scoring import NoAnswer
from tuneship.prompts.template import TemplateFailed
from tuneship.service.answers.field_errors import field_error
from tuneship.service.context.context import Context
from tuneship.service.deployments.lookup import shown_deployment
from tuneship.service.generation.drills import generation_run
from tuneship.service.generation.prompts import PromptTooLong
from tuneship.service.generation.routed_run import RoutedRun
from tuneship.service.generation.routing import RoutingTarget, cached, cached_row
from tuneship.service.models.served_models import ServedModel, models_of
from tuneship.store.database import tables
from tuneship.training.examples.conversation_rows import conversation_rows
from tuneship.training.examples.tokenized_examples import EncodedRow, Encoder


class _Request:
    """The form of an error, which both requests have in common."""

    def failed(self, context: Context, error: ApiError) -> tuple[int, bytes]:  # noqa: ARG002
        """Keep the code of an error and its status."""
        return error.status, json.dumps({"code": error.code, "status": error.status}).encode()

    def unanswered(self, why_not: str) -> bytes:
        """Keep the reason why the request is not answered any more."""
        return json.dumps({"code": why_not, "status": 0}).encode()


@dataclass(frozen=True)
class ExampleRequest(_Request):
    """One example, asked of one deployment."""

    deployment_id: str
    item: EvaluationItem
    # Limit and sampling of the answer.
    options: Mapping[str, Any]

    async def begin(self, context: Context) -> tuple[RoutedRun, Callable[[], bytes]]:
        """The run that answers, and what keeps its answer until it is graded."""
        request = Generate.model_validate(
            {
                "messages": self.item.messages,
                **self.options,
                **({"tools": [*self.item.tools]} if self.item.tools else {}),
            }
        )
        target = RoutingTarget(self.deployment_id)
        run = generation_run(context, target, request, time.perf_counter())

        def content() -> bytes:
            calls = [call.model_dump() for call in run.generation.tool_calls or ()]
            return json.dumps({"text": run.generation.completion, "calls": calls}).encode()

        return run, content


@dataclass(frozen=True)
class LikelihoodRequest(_Request):
    """How likely one deployment's model finds an answer to one example: the prompt is scored, and nothing generated."""

    deployment_id: str
    item: EvaluationItem
    answer: str

    async def begin(self, context: Context) -> tuple[RoutedRun, Callable[[], bytes]]:
        """The run that scores, and what keeps the sum of the scores."""
        # As the run below reads them, which then finds them in the cache.
        row = await cached_row(context, tables.deployments, self.deployment_id)
        deployment = shown_deployment(context, row)
        model = deployment["model_name"]
        served = await cached(
            context,
            ("model", model),
            lambda connection: models_of(context).served(connection, context.client_id, model),
        )
        row = await context.parts.threads.texts.run(
            context.client_id,
            learnt_row,
            served,
            self.item,
            self.answer,
            deployment["generation"]["context_length"],
        )
        request = Generate(
            prompt_token_ids=row.tokens, max_tokens=0, logprobs=0, prompt_logprobs=True
        )
        target = RoutingTarget(self.deployment_id)
        run = generation_run(context, target, request, time.perf_counter())

        def content() -> bytes:
            scored = zip(run.generation.prompt_logprobs or (), row.loss_mask, strict=True)
            # The first token of a prompt has none.
            found = [
                one.logprob for one, is_target in scored if is_target and one.logprob is not None
            ]
            return json.dumps({"sum": math.fsum(found), "tokens": len(found)}).encode()

        return run, content


def learnt_row(
    served: ServedModel, item: EvaluationItem, answer: str, context_length: int
) -> EncodedRow:
    """The tokens that training would learn this answer to the example by. Raises `ValidationFailed`."""
    turn: Message = {"role": "assistant", "content": answer}
    if item.calls:
        turn["tool_calls"] = [dict(call) for call in item.calls]
    # Of the answers, the last one alone is scored.
    before: list[Message] = [
        {**one, "weight": 0} if one["role"] == "assistant" else one for one in item.prompt
    ]
    text_format = served.format
    try:
        [row] = conversation_rows([*before, turn], text_format.template, item.tools)
    except TemplateFailed as error:
        raise field_error("messages", f"cannot be rendered: {error}") from error
    if served.base.is_surely_longer(sum(len(one.text) for one in row), context_length):
        raise PromptTooLong("messages", f"over {context_length}", context_length)
    [found] = Encoder(text_format, context_length, served.base.vocabulary).encode([row])
    if not (found.is_asked_alike and any(found.loss_mask[1:])):
        text = "the tokenizer joins the beginning of the answer with the end of its prompt"
        raise field_error("messages", text)
    return found


def answer_in(content: bytes) -> AnswerToScore | Likelihood | NoAnswer:
    """Read what a request has kept."""
    kept: dict[str, Any] = json.loads(content)
    if "code" in kept:
        return NoAnswer(kept["code"], kept["status"])
    if "sum" in kept:
        return Likelihood(kept["sum"], kept["tokens"])
    return AnswerToScore(kept["text"], kept["calls"])
