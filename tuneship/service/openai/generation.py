"""Handlers of chat completions and completions: they find what answers, and run the generation of the main API."""

import time
from collections.abc import Callable
from typing import TypeVar

from tuneship.contract.generation import Generate, Generation
from tuneship.contract.openai import chat as chat_contract
from tuneship.contract.openai import completions as completions_contract
from tuneship.contract.openai.answering import SampledRequest
from tuneship.contract.openai.chat import ChatCompletion, ChatCompletionCreate
from tuneship.contract.openai.completions import TextCompletion, TextCompletionCreate
from tuneship.contract.openai.ids import shown_id
from tuneship.service.common.streaming import Stream
from tuneship.service.context.context import Context
from tuneship.service.generation.generation_run import GenerationRun
from tuneship.service.openai.answers import (
    AnswerHead,
    Pieces,
    chat_completion,
    chat_pieces,
    generation_of,
    openai_stream,
    routing_key_of,
    text_completion,
    text_pieces,
    turns_of,
)
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.refusals import with_names
from tuneship.service.openai.targets import deployment_of, target_of
from tuneship.store.identifiers import new_id
from tuneship.store.row_types import DeploymentRow

T = TypeVar("T")


@serves_openai(chat_contract.openai_create_chat_completion)
async def openai_create_chat_completion(
    context: Context, request: ChatCompletionCreate
) -> ChatCompletion | Stream:
    """Continue the conversation; without a limit, up to what the deployment allows."""
    limit = request.max_completion_tokens or request.max_tokens
    name = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"

    def prepared(deployment: DeploymentRow | None) -> Generate:
        most = limit
        if most is None and deployment is not None:
            most = deployment["generation"]["max_output_tokens"]
        return generation_of(request, messages=turns_of(request.messages), max_tokens=most)

    with with_names({"max_tokens": name}):
        return await _answer(context, request, prepared, chat_completion, chat_pieces)


@serves_openai(completions_contract.openai_create_completion)
async def openai_create_completion(
    context: Context, request: TextCompletionCreate
) -> TextCompletion | Stream:
    """Answer the text."""
    prepared = generation_of(request, prompt=request.prompt, max_tokens=request.max_tokens)
    return await _answer(context, request, lambda _: prepared, text_completion, text_pieces)


async def _answer(
    context: Context,
    request: SampledRequest,
    prepared: Callable[[DeploymentRow | None], Generate],
    whole: Callable[[AnswerHead, Generation], T],
    in_pieces: Callable[[AnswerHead], Pieces],
) -> T | Stream:
    started = time.perf_counter()
    if context.routing_key is None:
        context.routing_key = routing_key_of(request.person)
    target = await target_of(context, request.model)
    deployment = await deployment_of(context, target)
    run = GenerationRun(context, target, prepared(deployment), started)
    prefix = "chatcmpl" if whole is chat_completion else "cmpl"
    head = AnswerHead(
        shown_id(new_id("gen"), prefix),
        int(context.now.timestamp()),
        deployment["model_name"] if deployment is not None else "",
    )
    if request.stream:
        stream = await run.stream()
        return await openai_stream(stream, in_pieces(head), wants_usage=request.wants_usage)
    return whole(head, await run.answer())
