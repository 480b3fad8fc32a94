"""The requests of an evaluation: each asks one deployment for its answer to one example.

An answer is graded right after it was given, and only its scores are stored.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuneship.contract.errors import ApiError
from tuneship.contract.generation import Generate
from tuneship.evaluation.graders import GivenAnswer
from tuneship.evaluation.items import EvaluationItem
from tuneship.evaluation.scoring import NoAnswer
from tuneship.service.context.context import Context
from tuneship.service.generation.drills import generation_run
from tuneship.service.generation.routed_run import RoutedRun
from tuneship.service.generation.routing import RoutingTarget


@dataclass(frozen=True)
class ExampleRequest:
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

    def failed(self, context: Context, error: ApiError) -> tuple[int, bytes]:  # noqa: ARG002
        """Keep the code of an error and its status."""
        return error.status, json.dumps({"code": error.code, "status": error.status}).encode()

    def unanswered(self, why_not: str) -> bytes:
        """Keep the reason why the request is not answered any more."""
        return json.dumps({"code": why_not, "status": 0}).encode()


def answer_in(content: bytes) -> GivenAnswer | NoAnswer:
    """Read what a request has kept."""
    kept: dict[str, Any] = json.loads(content)
    if "code" in kept:
        return NoAnswer(kept["code"], kept["status"])
    return GivenAnswer(kept["text"], kept["calls"])
