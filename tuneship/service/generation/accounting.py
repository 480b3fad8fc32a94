"""Records how a generation ended: in its deployment's metrics and log, and in the answer's headers. Never any text.

Each routed request is counted once: answered, failed, cancelled because the caller disconnected, or refused by the
deployment. A generation that outlasts `generate_timeout_s` is the deployment's error. A request of a batch that is
cancelled with it, or that never had its turn, or one whose key has ended, is not counted: nobody has lost patience
with the deployment.
"""

import time
from dataclasses import dataclass, replace

from tuneship.contract.errors import ApiError, DeploymentError, InternalError
from tuneship.contract.generation import TokenLogprob
from tuneship.contract.schemas.tools import WrittenCall
from tuneship.metrics.observations import Observation, RequestOutcome
from tuneship.service.context.context import Context
from tuneship.service.generation.routing import RoutingTarget
from tuneship.store.records.deployment_logs import LogEntry


class NoTurn(InternalError):
    """A batch's request ran out of time while other requests went first."""

    def __init__(self) -> None:
        super().__init__("the request waited too long behind others", status=503, retry_after=1)


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """One completion; with log probabilities where the request asks for them."""

    completion: str
    finish_reason: str
    # Number of its tokens.
    tokens: int
    logprobs: list[TokenLogprob] | None = None
    # The token that ended it, which is no part of its text.
    end: TokenLogprob | None = None
    # Those of its prompt, with the first answer to it.
    prompt_logprobs: list[TokenLogprob] | None = None
    # The calls that it ends with.
    tool_calls: list[WrittenCall] | None = None


@dataclass(frozen=True, slots=True)
class WrittenAnswers:
    """All answers of a request: `n` for each of its prompts, in the order of the prompts."""

    answers: list[WrittenAnswer]
    # Tokens of the prompts, each counted once.
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def is_empty(self) -> bool:
        """Whether an answer was wanted, and neither a text nor a call came.

        A request for a prompt's log probabilities wants none.
        """
        is_scored = any(answer.prompt_logprobs is not None for answer in self.answers)
        is_written = any(answer.completion.strip() or answer.tool_calls for answer in self.answers)
        return not is_scored and not is_written


@dataclass(frozen=True, slots=True)
class GenerationAccount:
    """Counts one routed request when it ends.

    `started` is a `time.perf_counter` reading, `replicas` the number that ran when the request came.
    """

    context: Context
    target: RoutingTarget
    started: float
    replicas: int

    def succeeded(self, written: WrittenAnswers, first_token: float | None) -> None:
        """Count a request with the tokens of all its answers; the metrics say enough, so nothing is logged.

        `first_token`: when it came, by `time.perf_counter`; None for an answer without any.
        """
        after_ms = None if first_token is None else (first_token - self.started) * 1000
        self._record(
            replace(
                self._ended(RequestOutcome.SUCCESS),
                first_token_ms=after_ms,
                prompt_tokens=written.prompt_tokens,
                completion_tokens=written.completion_tokens,
                is_empty=written.is_empty,
            )
        )

    def embedded(self, texts: int, tokens: int) -> None:
        """Count a request for embeddings, which has no text that could be empty, with the tokens of its texts."""
        ended = self._ended(RequestOutcome.SUCCESS)
        self._record(replace(ended, prompt_tokens=tokens, embedded_texts=texts))

    def cancelled(self) -> None:
        """Count a caller who disconnected before the answer ended."""
        if self.context.is_background:
            self._log("info", "a request of a batch was cancelled")
            return
        if self.context.key_has_ended:
            self._log("info", "the caller's API key has ended")
            return
        self._record(self._ended(RequestOutcome.CANCELLED, by_caller=True))
        self._log("info", "the caller disconnected")

    def failed(self, error: Exception) -> None:
        """Count and log a refusal by the deployment, or an error of it. Messages never hold text of the request."""
        if isinstance(error, NoTurn):
            self._log("info", f"{error.status} {error.code}: {error.message}")
            return
        # A deployment that cannot serve is at fault, even though the answer is a 409.
        is_client_error = isinstance(error, ApiError) and error.status < 500
        is_refusal = is_client_error and not isinstance(error, DeploymentError)
        if is_refusal:
            self._record(self._ended(RequestOutcome.REFUSED, by_caller=True))
        else:
            self._record(self._ended(RequestOutcome.SERVER_ERROR, by_caller=True))
            self.context.span.error = error.code if isinstance(error, ApiError) else "unexpected"

        if not isinstance(error, ApiError):
            self._log("error", "failed unexpectedly")
            return
        level = "info" if is_refusal else "error" if isinstance(error, InternalError) else "warning"
        self._log(level, f"{error.status} {error.code}: {error.message}")
        # The driver of a canary has to know which of its two deployments failed.
        error.headers |= {"X-Deployment-ID": self.target.deployment_id}

    def _ended(self, outcome: RequestOutcome, *, by_caller: bool = False) -> Observation:
        """`by_caller`: also count by caller, who is the routing key if there is one, else the API key."""
        target, caller = self.target, None
        if by_caller:
            # Neither is stored.
            key = self.context.routing_key
            name = f"key {self.context.audit_facts.key_id}" if key is None else f"routing key {key}"
            caller = self.context.parts.recorder.number_of(name)
        return Observation(
            deployment_id=target.deployment_id,
            endpoint_id=target.endpoint_id,
            ended_at=self.context.now.timestamp(),
            outcome=outcome,
            latency_ms=(time.perf_counter() - self.started) * 1000,
            is_background=self.context.is_background,
            caller=caller,
            sticky_key=target.sticky_key,
            spread_keys=target.spread_keys,
            replicas=self.replicas,
        )

    def _record(self, observation: Observation) -> None:
        self.context.parts.recorder.record(observation)

    def _log(self, level: str, message: str) -> None:
        context = self.context
        context.parts.deployment_log.add(
            LogEntry(
                self.target.deployment_id,
                context.now,
                level,
                "generate",
                message,
                context.request_id,
            )
        )
