"""Handlers of chat completions and completions: they find what answers, and run the generation of the main API."""

import time
from functools import partial

from tuneship.contract.openai import chat as chat_contract
from tuneship.contract.openai import completions as completions_contract
from tuneship.contract.openai.chat import ChatCompletion, ChatCompletionCreate
from tuneship.contract.openai.completions import TextCompletion, TextCompletionCreate
from tuneship.contract.openai.ids import shown_id
from tuneship.service.common.streaming import Stream
from tuneship.service.context.context import Context
from tuneship.service.generation.drills import generation_run
from tuneship.service.openai.answers import (
    AnswerHead,
    chat_completion,
    chat_pieces,
    choice_fields,
    generation_of,
    joined_turns,
    openai_stream,
    text_completion,
    text_pieces,
)
from tuneship.service.openai.bindings import serves_openai
from tuneship.service.openai.model_lookup import Answerer, answerer_of
from tuneship.service.openai.refusals import with_names
from tuneship.store.database.identifiers import new_id


@serves_openai(chat_contract.openai_create_chat_completion)
async def openai_create_chat_completion(
    context: Context, request: ChatCompletionCreate
) -> ChatCompletion | Stream:
    """Continue the conversation; without a limit, up to what the deployment allows."""
    started = time.perf_counter()
    answerer = await answerer_of(context, request.model, request.person)
    head = _head(context, answerer, "chatcmpl")
    name = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
    schema = {"response_format.schema": "response_format.json_schema.schema"}
    with with_names({"max_tokens": name, "logprobs": "top_logprobs", **schema}):
        limit = request.max_completion_tokens or request.max_tokens
        form = request.response_format
        wanted = generation_of(
            request,
            messages=joined_turns([message.turn for message in request.messages]),
            tools=request.tools,
            max_tokens=limit or answerer.settings.get("max_output_tokens"),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            response_format=None if form is None else form.for_the_main_api,
            **choice_fields(request),
        )
        run = generation_run(context, answerer.target, wanted, started)
        if request.stream:
            return await openai_stream(await run.stream(), chat_pieces(head, request))
        return await run.in_form(partial(chat_completion, head), await run.answer())


@serves_openai(completions_contract.openai_create_completion)
async def openai_create_completion(
    context: Context, request: TextCompletionCreate
) -> TextCompletion | Stream:
    """Continue each prompt. Without log probabilities, an echo alone needs those of the prompt all the same."""
    started = time.perf_counter()
    first, is_echo_alone = request.prompt[0], request.max_tokens == 0
    logprobs = request.logprobs
    wanted = generation_of(
        request,
        prompt=first if isinstance(first, str) else None,
        prompt_token_ids=None if isinstance(first, str) else first,
        raw=True,
        max_tokens=request.max_tokens,
        logprobs=0 if is_echo_alone and logprobs is None else logprobs,
        prompt_logprobs=is_echo_alone or (request.echo and logprobs is not None),
    )
    answerer = await answerer_of(context, request.model, request.person)
    head = _head(context, answerer, "cmpl")
    with with_names({"prompt_token_ids": "prompt"}):
        run = generation_run(context, answerer.target, wanted, started, request.prompt)
        if request.stream:
            pieces = text_pieces(head, request, lambda: run.written)
            return await openai_stream(await run.stream(), pieces)
        generation = await run.answer()
        texts = [run.text_of(prompt) if request.echo else "" for prompt in request.prompt]
        form = partial(text_completion, head, request, run.written, texts)
        return await run.in_form(form, generation)


def _head(context: Context, answerer: Answerer, prefix: str) -> AnswerHead:
    return AnswerHead(shown_id(new_id("gen"), prefix), int(context.now.timestamp()), answerer.model)
