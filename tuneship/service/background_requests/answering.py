"""Answers one request as if its caller had sent it: the audit chain and the metrics record it like any other.

An error that may pass is tried again before it becomes the answer.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

from tuneship.contract.errors import ApiError
from tuneship.service.access.audit_facts import AuditFacts
from tuneship.service.access.hipaa import Caller
from tuneship.service.answers.failures import error_from_exception
from tuneship.service.context.context import Context, NewContext
from tuneship.service.generation.routed_run import RoutedRun
from tuneship.store.database.identifiers import new_id
from tuneship.store.records.audit import Person


class BackgroundRequest(Protocol):
    """One request, and the form in which its answer is stored."""

    async def begin(self, context: Context) -> tuple[RoutedRun, Callable[[], bytes]]:
        """The run of the main API that answers, and a function that returns the content to keep of its answer.

        Called for each try; any error answers the request.
        """
        ...

    def failed(self, context: Context, error: ApiError) -> tuple[int, bytes]:
        """The status for the audit chain, and the content that is kept."""
        ...

    def unanswered(self, why_not: str) -> bytes:
        """The content that is kept where the request is not answered any more."""
        ...


@dataclass(frozen=True)
class BackgroundAnswer:
    """An answer or an error as it is kept, and the facts that its resource counts."""

    content: bytes
    is_success: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    model: str | None = None
    # It touched something with `audit_logging`.
    has_audit: bool = False
    # It touched something in hipaa mode.
    is_hipaa: bool = False


@dataclass(frozen=True)
class BackgroundCaller:
    """The caller on whose behalf requests are answered."""

    client_id: str
    # What `kept_caller` returned for the request that made the resource.
    kept: Mapping[str, Any]
    # The name of the requests' operation in the audit chain.
    action: str
    resource_id: str

    def context(self, new: NewContext) -> Context:
        """The context of one more request."""
        kept = self.kept
        lifetime_s = kept["key_lifetime_s"]
        return new(
            self.client_id,
            new_id("req"),
            scopes=frozenset(kept["scopes"]),
            caller=Caller(
                is_private=kept["is_private"],
                is_address_known=kept["is_address_known"],
                key_lifetime=None if lifetime_s is None else timedelta(seconds=lifetime_s),
            ),
            audit_facts=AuditFacts(
                key_id=kept["key_id"],
                person=None if kept.get("person") is None else Person(**kept["person"]),
                address=kept["address"],
                action=self.action,
                path_id=self.resource_id,
            ),
            is_background=True,
        )


def kept_caller(context: Context, *, is_private: bool) -> dict[str, Any]:
    """The facts of a caller for the row of a resource: for safeguards and the audit chain of its later requests."""
    caller, facts = context.caller, context.audit_facts
    lifetime = caller.key_lifetime
    return {
        "key_id": facts.key_id,
        "person": None if facts.person is None else asdict(facts.person),
        "scopes": sorted(context.scopes),
        "address": facts.address,
        "is_private": is_private,
        "is_address_known": caller.is_address_known,
        "key_lifetime_s": None if lifetime is None else lifetime.total_seconds(),
    }


async def answer(
    new_context: NewContext,
    caller: BackgroundCaller,
    request: BackgroundRequest,
    retry_after_s: Sequence[float],
) -> BackgroundAnswer:
    """Answer a request, and retry it where an error may pass. `retry_after_s`: the pauses before the retries."""
    pauses = iter(retry_after_s)
    while True:
        context, status = caller.context(new_context), 200
        try:
            run, content_of = await request.begin(context)
            content = await run.answer_as(content_of)
        except Exception as error:  # noqa: BLE001 - each request is answered, whatever fails
            declared = error_from_exception(error, context.request_id)
            pause = next(pauses, None) if declared.retryable else None
            if pause is not None:
                await asyncio.sleep(pause)
                continue
            status, content = request.failed(context, declared)
        facts, is_success = context.audit_facts, status == 200
        if facts.requires_entry(status):
            await asyncio.to_thread(context.commit_audit_entry, status)
        return BackgroundAnswer(
            content,
            is_success=is_success,
            prompt_tokens=facts.prompt_tokens or 0,
            completion_tokens=facts.completion_tokens or 0,
            model=context.model if is_success else None,
            has_audit=facts.is_required,
            is_hipaa=facts.touches_hipaa,
        )
