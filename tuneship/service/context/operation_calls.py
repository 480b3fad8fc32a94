"""Carries out an operation for one caller, with all that makes this safe. Knows no HTTP framework.

The order: scope and condition, a slot, the arguments, the handler, the audit entry, the answer. A handler in a thread
has one transaction for its changes, the row of its idempotency key and its audit entry.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
)
from dataclasses import dataclass
from functools import partial
from typing import Any

from tuneship.contract.errors import ApiError, AuthenticationError, InvalidRequestError
from tuneship.service.access.api_keys import Keys
from tuneship.service.answers.downloads import Download
from tuneship.service.answers.failures import error_from_exception
from tuneship.service.answers.long_answers import dumped, is_long
from tuneship.service.answers.streaming import Stream
from tuneship.service.context import profiles
from tuneship.service.context.bindings import BoundOperation
from tuneship.service.context.context import Context
from tuneship.service.context.request_slots import RequestSlots
from tuneship.store.records import idempotency

# Returns when the caller has gone.
Departure = Callable[[], Coroutine[Any, Any, object]]
# Returns, when the caller's key ends, the error with which a call or an answer breaks off.
KeyEnd = Callable[[], Coroutine[Any, Any, ApiError]]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, read and checked."""

    values: Mapping[str, Any]
    key: idempotency.Key | None = None
    # Raised instead of a call of the handler: only a stored answer can still be given.
    no_room: ApiError | None = None


@dataclass(frozen=True)
class WholeAnswer:
    """An answer in JSON."""

    status: int
    body: bytes
    headers: Mapping[str, str]


# Before it is known how an answer is sent.
AnyAnswer = WholeAnswer | Stream | Download


@dataclass(frozen=True)
class OngoingAnswer:
    """An answer that is made while it is sent."""

    content: Stream | Download
    # Held until the last byte; entering it may raise.
    slot: AbstractContextManager[object]
    key_end: KeyEnd


class OperationCalls:
    """Carries out the calls of one operation."""

    def __init__(self, bound: BoundOperation, keys: Keys, slots: RequestSlots) -> None:
        self._bound = bound
        self._operation = bound.operation
        self._keys = keys
        self._in_flight = slots.of(bound)
        self._streams = slots.streams

    async def carry_out(
        self,
        context: Context,
        reading: AbstractAsyncContextManager[Arguments],
        departure: Departure,
        status_of: Callable[[ApiError], int] = lambda error: error.status,
    ) -> WholeAnswer | OngoingAnswer:
        """Carry out one call. Raises `ApiError`, which is then in the audit chain where that is required.

        `reading` is entered when the caller may make the call, and left after the handler. `departure` returns when the
        caller has gone, and is called after the reading. `status_of` is the status that the caller sees for an error.
        """
        try:
            self._check_access(context)
            with ExitStack() as held:
                if self._in_flight is not None:
                    held.enter_context(self._in_flight.slot(context.client_id))
                async with reading as arguments:
                    answer = await self._answered(context, arguments, departure)
                if isinstance(answer, WholeAnswer):
                    return answer
                slot = held.pop_all() if self._in_flight else self._streams.slot(context.client_id)
                return OngoingAnswer(answer, slot, partial(self._key_end, context))
        except Exception as error:  # noqa: BLE001 - it is logged, and becomes an error of the contract
            declared = error_from_exception(error, context.request_id)
            await _commit_audit_entry(context, status_of(declared))
            raise declared from None

    def _check_access(self, context: Context) -> None:
        operation = self._operation
        context.require(operation.scope)
        # A change that cannot check the condition is refused: without it the caller may not want the change.
        is_conditional = context.if_match is not None
        if operation.is_change and is_conditional and "If-Match" not in operation.headers:
            raise InvalidRequestError(
                "If-Match is not supported here, since the resource has no version: leave it out"
            )

    async def _answered(
        self, context: Context, arguments: Arguments, departure: Departure
    ) -> AnyAnswer:
        # The file may have taken long to arrive.
        key_id = context.audit_facts.key_id
        if self._operation.is_form and await asyncio.to_thread(self._keys.is_ended, key_id):
            raise _key_ended()
        if not self._bound.is_async:
            return await self._in_thread(context, arguments, departure)

        handling = self._bound.handler(context, **arguments.values)
        reply = await _unless_unwanted(handling, departure(), self._key_end(context))
        async with AsyncExitStack() as begun:
            if isinstance(reply, Stream):
                # A model works on it already: close it when the audit entry cannot be written.
                begun.push_async_callback(reply.frames.aclose)
            elif isinstance(reply, Download):
                begun.callback(reply.close)
            await _commit_audit_entry(context, self._operation.status)
            begun.pop_all()
        if is_long(reply):
            texts = context.parts.threads.texts
            return await texts.run(context.client_id, self._answer, context, reply)
        return self._answer(context, reply)

    async def _in_thread(
        self, context: Context, arguments: Arguments, departure: Departure
    ) -> AnyAnswer:
        threads, work = context.parts.threads, partial(self._in_transaction, context, arguments)
        if self._bound.own_threads is None:
            pool = threads.files if self._bound.is_long else threads.requests
            return await pool.run(context.client_id, work)
        # Nothing is cancelled: the thread ends its work, and with it the transaction.
        ending = [asyncio.ensure_future(end) for end in (departure(), self._key_end(context))]
        for end in ending:
            end.add_done_callback(lambda _: context.left.set())
        try:
            return await getattr(threads, self._bound.own_threads).run(context.client_id, work)
        except ApiError:
            if context.key_has_ended:
                raise _key_ended() from None
            raise
        finally:
            for end in ending:
                end.cancel()

    async def _key_end(self, context: Context) -> ApiError:
        """The error for a caller whose key ends, once it has ended."""
        await self._keys.wait_until_ended(context.audit_facts.key_id)
        context.key_has_ended = True
        return _key_ended()

    def _handled(self, context: Context, arguments: Arguments) -> Any:
        if arguments.no_room is not None:
            raise arguments.no_room
        return self._bound.handler(context, **arguments.values)

    def _in_transaction(self, context: Context, arguments: Arguments) -> AnyAnswer:
        """Run the handler in one transaction with its idempotency row and its audit entry."""
        hold = None if arguments.key is None else _hold_key(context, arguments.key)
        if isinstance(hold, WholeAnswer):
            return hold
        try:
            reply = self._handled(context, arguments)
            answer = self._answer(context, reply)
            status = self._operation.status
            if isinstance(answer, WholeAnswer):
                status = answer.status
            if self._operation.is_creating:
                context.audit_facts.created_id = reply.id
            if context.audit_facts.requires_entry(status):
                context.add_audit_entry(context.transaction, status)
            if hold is not None and isinstance(answer, WholeAnswer):
                body = context.parts.vault.seal(answer.body, hold.key.about)
                location = answer.headers.get("Location")
                stored = idempotency.StoredAnswer(status, location, body)
                idempotency.finish(context.transaction, hold, stored)
            context.commit()
        except BaseException as error:
            context.roll_back(error)
            if hold is not None:
                # Outside the transaction, which is gone: the key is free for a retry.
                with context.parts.database.write(context.client_id) as connection:
                    idempotency.abandon(connection, hold)
            raise
        return answer

    def _answer(self, context: Context, reply: Any) -> AnyAnswer:
        if isinstance(reply, Stream | Download):
            return reply
        operation, settings = self._operation, context.parts.settings
        # A handler of a long answer returns it as JSON.
        is_json = isinstance(reply, bytes)
        body = reply if is_json else dumped(operation.reply_type, reply)
        if context.profile != "auto":
            shaped = profiles.shaped(operation.name, context.profile, json.loads(body))
            body = json.dumps(shaped).encode()
        status, headers = operation.status, dict(context.headers)
        if profiles.HEADER in operation.headers:
            headers[profiles.HEADER] = context.profile
        if operation.is_creating:
            status = settings.created_status
            headers["Location"] = f"{operation.path.removesuffix('/merge')}/{reply.id}"
        return WholeAnswer(status, body, headers)


def _key_ended() -> AuthenticationError:
    return AuthenticationError("the API key was revoked or has expired")


async def _commit_audit_entry(context: Context, status: int) -> None:
    """Commit the audit entry of a call that requires one; if this fails, there is no answer."""
    if context.audit_facts.requires_entry(status):
        await asyncio.to_thread(context.commit_audit_entry, status)


async def _unless_unwanted(
    work: Coroutine[Any, Any, Any],
    departure: Coroutine[Any, Any, object],
    key_end: Coroutine[Any, Any, ApiError],
) -> Any:
    """The result of `work`, which is cancelled when its caller disconnects.

    Raises `InvalidRequestError` then, or the result of `key_end` as soon as there is one.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(departure)
    ending = asyncio.ensure_future(key_end)
    try:
        await asyncio.wait({working, leaving, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        if ending.done():
            raise ending.result()
    finally:
        leaving.cancel()
        ending.cancel()
        if not working.done():
            working.cancel()
            await asyncio.wait({working})
    raise InvalidRequestError("the caller disconnected")


def _hold_key(context: Context, key: idempotency.Key) -> WholeAnswer | idempotency.Hold | None:
    """The stored answer to an idempotency key, or a hold on the key for the answer to come."""
    begin = idempotency.begin if key.retry is None else idempotency.begin_try
    with context.parts.database.write(context.client_id) as connection:
        begun = begin(connection, key, context.now, context.parts.member_number)
        if begun is None or isinstance(begun, idempotency.Hold):
            return begun
        # A replayed answer is audited like the first one, by the resource that it is about.
        created_id = (begun.location or "").rpartition("/")[2]
        context.touch_by_id(connection, created_id or context.audit_facts.path_id or "")
        context.add_audit_entry(connection, begun.status)
    body = context.parts.vault.open(begun.body, key.about)
    headers = {"Idempotent-Replayed": "true"}
    if begun.location:
        headers["Location"] = begun.location
    return WholeAnswer(begun.status, body, headers)
