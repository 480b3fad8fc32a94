"""Chat completions and completions: what answers them, their runs of the main API's generation, and their handlers."""

import time
from collections.abc import Awaitable

from tuneship.contract.openai import chat as chat_contract
from tuneship.contract.openai import completions as completions_contract
from tuneship.contract.openai.chat import ChatCompletion, ChatCompletionCreate
from tuneship.contract.openai.completions import TextCompletion, TextCompletionCreate
from tuneship.contract.openai.ids import shown_id
from tuneship.service.answers.field_errors import with_names
from tuneship.service.answers.streaming import Stream
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
from tuneship.service.openai.openai_run import OpenAIRun
from tuneship.store.database.identifiers import new_id


@serves_openai(chat_contract.openai_create_chat_completion)
async def openai_create_chat_completion(
    context: Context, request: ChatCompletionCreate
) -> ChatCompletion | Stream:
    """Continue the conversation."""
    return await (await chat_run(context, request)).answer()


async def chat_run(context: Context, request: ChatCompletionCreate) -> OpenAIRun[ChatCompletion]:
    """The run that continues a conversation; without a limit, up to what the deployment allows."""
    started = time.perf_counter()
    answerer = await answerer_of(context, request.model, request.person)
    head = _head(context, answerer, "chatcmpl")
    name = "max_completion_tokens" if request.max_completion_tokens else "max_tokens"
    schema = {"response_format.schema": "response_format.json_schema.schema"}
    names = {"max_tokens": name, "logprobs": "top_logprobs", **schema}
    with with_names(names):
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
    run.names = names

    def reply() -> ChatCompletion:
        return chat_completion(head, run.generation)

    def stream() -> Awaitable[Stream]:
        return openai_stream(run.stream(), chat_pieces(head, request))

    return OpenAIRun(run, reply, stream if request.stream else None)


@serves_openai(completions_contract.openai_create_completion)
async def openai_create_completion(
    context: Context, request: TextCompletionCreate
) -> TextCompletion | Stream:
    """Continue each prompt."""
    return await (await text_run(context, request)).answer()


async def text_run(context: Context, request: TextCompletionCreate) -> OpenAIRun[TextCompletion]:
    """The run that continues texts. Without log probabilities, an echo alone needs those of the prompt all the same."""
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
    run = generation_run(context, answerer.target, wanted, started, request.prompt)
    run.names = {"prompt_token_ids": "prompt"}

    def reply() -> TextCompletion:
        texts = [run.text_of(prompt) if request.echo else "" for prompt in request.prompt]
        return text_completion(head, request, run.written, texts, run.generation)

    def stream() -> Awaitable[Stream]:
        return openai_stream(run.stream(), text_pieces(head, request, lambda: run.written))

    return OpenAIRun(run, reply, stream if request.stream else None)


def _head(context: Context, answerer: Answerer, prefix: str) -> AnswerHead:
    return AnswerHead(shown_id(new_id("gen"), prefix), int(context.now.timestamp()), answerer.model)
