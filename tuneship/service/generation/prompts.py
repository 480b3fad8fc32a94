"""Renders a prompt to tokens and builds the request to the replica, with the deployment's defaults filled in.

Only the model's template may write special tokens; what a caller sends is always text: a prompt that says
`<|system|>` would otherwise open a turn of its own. Training does read special tokens in its examples as such, with a
warning: the author of a dataset writes turns, the author of a prompt must not.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tuneship.contract.errors import ErrorDetail, ValidationFailed
from tuneship.contract.generation import Generate
from tuneship.contract.lines.dataset_lines import instruction_messages
from tuneship.contract.token_inputs import TextOrIds
from tuneship.prompts.template import PromptTemplate, TemplateFailed, TemplateTooSlow
from tuneship.prompts.template_budget import ANYWHERE, RenderLimits
from tuneship.prompts.text_format import ModelTextFormat, token_at
from tuneship.prompts.text_tokenizer import encode, encoding_of
from tuneship.service.answers.field_errors import field_error
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.models.served_models import ServedModel
from tuneship.serving.replica_client import GenerateRequest
from tuneship.store.database.rows import Row

DEFAULT_MAX_TOKENS = 256
# Characters beyond which tokenizing would hold up the event loop: a thousand take up to two milliseconds.
LONG_PROMPT_CHARACTERS = 1_000
# Rendering a turn of a conversation takes as long as tokenizing this many characters.
TURN_CHARACTERS = 50
# For a rendering on the event loop; one that would do more is done in a thread. The characters are those of the longest
# prompts there, and what a template adds to them.
ON_THE_LOOP = RenderLimits(steps=20_000, characters=4 * LONG_PROMPT_CHARACTERS)
# Characters without a meaning: they stand for special tokens while the template renders the text.
PRIVATE_USE = range(0xF0000, 0xFFFFE)


def raw_prompts(request: Generate) -> Sequence[TextOrIds]:
    """The prompt of a request that wants no template; none of one that does."""
    if request.prompt_token_ids is not None:
        return (request.prompt_token_ids,)
    return (request.prompt,) if request.raw and request.prompt is not None else ()


def is_long_prompt(request: Generate, raw: Sequence[TextOrIds]) -> bool:
    """Whether rendering and tokenizing take too long for the event loop; with functions, nobody counts."""
    if request.tools:
        return True
    characters = sum(map(len, raw or (request.prompt or "",)))
    for turn in request.messages or ():
        characters += len(turn.text) + TURN_CHARACTERS
        for call in turn.tool_calls or ():
            characters += len(call.function.arguments) + TURN_CHARACTERS
    return characters > LONG_PROMPT_CHARACTERS


def replica_requests(
    deployment: Row,
    served: ServedModel,
    request: Generate,
    raw: Sequence[TextOrIds],
    limits: RenderLimits = ANYWHERE,
) -> list[GenerateRequest]:
    """A request for each of the `raw` prompts, or without one for the prompt that the model's template renders.

    Fills in the deployment's defaults. Raises `ValidationFailed` for a prompt that does not fit, and for `max_tokens`
    above the deployment's limit; and `TemplateTooSlow` beyond `limits` that are those of the event loop.
    """
    context_length, param = deployment["generation"]["context_length"], prompt_param(request)
    if raw:
        found = [raw_tokens(served.base, prompt, context_length, param) for prompt in raw]
    else:
        messages: list[Any] = [turn.for_the_template for turn in request.messages or ()]
        if request.prompt is not None:
            messages = list(instruction_messages(request.prompt))
        tools = shown_tools(request)
        characters = sum(len(text) for text in texts_within([messages, tools]))
        if served.base.is_surely_longer(characters, context_length):
            raise PromptTooLong(param, f"over {context_length}", context_length)
        rendered = rendered_prompt(served.format, messages, param, tools, limits)
        if served.base.is_surely_longer(len(rendered.text), context_length):
            raise PromptTooLong(param, f"over {context_length}", context_length)
        found = [rendered.tokens]
    return [_replica_request(deployment, served, request, tokens) for tokens in found]


def shown_tools(request: Generate) -> list[dict[str, Any]]:
    """The functions that the model reads: all of the request, or none where it must not call any."""
    if request.tool_choice == "none":
        return []
    return [tool.for_the_template for tool in request.tools or ()]


def texts_within(value: object) -> Iterator[str]:
    """Yield every text in a value of JSON, names included."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, Mapping):
            waiting += [*cast("Mapping[str, object]", one).items()]
        elif isinstance(one, list | tuple):
            waiting += cast("Sequence[object]", one)


def raw_tokens(
    base: CataloguedModel, prompt: TextOrIds, context_length: int, param: str
) -> list[int]:
    """Token ids of a prompt without a template. Raises `ValidationFailed`."""
    if isinstance(prompt, str):
        if base.is_surely_longer(len(prompt), context_length):
            raise PromptTooLong(param, f"over {context_length}", context_length)
        tokenizer: Any = base.tokenizer
        tokens: list[int] = tokenizer.encode_batch_fast([prompt], add_special_tokens=True)[0].ids
        if not tokens:
            raise field_error(param, "holds no token")
        return tokens
    if max(prompt) >= base.vocabulary:
        raise field_error(param, "holds a token id that the model does not know")
    return prompt


def _replica_request(
    deployment: Row, served: ServedModel, request: Generate, tokens: Sequence[int]
) -> GenerateRequest:
    configuration = deployment["generation"]
    context_length = configuration["context_length"]
    room = context_length - len(tokens)
    if room < (request.max_tokens != 0):
        raise PromptTooLong(prompt_param(request), str(len(tokens)), context_length)

    most, wanted = configuration["max_output_tokens"], request.max_tokens
    if wanted is None:
        wanted = min(DEFAULT_MAX_TOKENS, most)
    elif wanted > most:
        raise field_error("max_tokens", f"must be at most {most}", "out_of_range")
    temperature, top_p = request.temperature, request.top_p
    return GenerateRequest(
        adapter=served.adapter.name if served.adapter else None,
        tokens=tuple(tokens),
        max_tokens=min(wanted, room),
        temperature=configuration["default_temperature"] if temperature is None else temperature,
        top_p=configuration["default_top_p"] if top_p is None else top_p,
        seed=request.seed,
        stop_tokens=served.format.stop_tokens,
        queue=deployment["id"],
        owner=owner_of(deployment),
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.prompt_logprobs else None,
    )


def owner_of(deployment: Row) -> str:
    """The deployment's owner as a hash, because replicas let owners take turns without knowing the tenant's name."""
    return hashlib.sha256(deployment["client_id"].encode()).hexdigest()[:16]


def prompt_param(request: Generate) -> str:
    """The name of the field that holds the prompt."""
    names = ("prompt", "messages", "prompt_token_ids")
    return next(name for name in names if getattr(request, name) is not None)


class PromptTooLong(ValidationFailed):
    """A prompt does not fit into the context."""

    def __init__(self, param: str, tokens: str, context_length: int) -> None:
        """`tokens`: a number, or a text that says there are more than one."""
        message = f"has {tokens} tokens, the context holds {context_length}"
        details = [ErrorDetail(param, "out_of_range", message)]
        super().__init__(f"{param} {message}", param=param, details=details)
        self.tokens = tokens
        self.is_conversation = param == "messages"
        self.context_length = context_length


@dataclass(frozen=True)
class RenderedPrompt:
    """The text of a prompt up to the assistant's turn."""

    text_format: ModelTextFormat
    text: str
    # The tokens that stand for a character in it.
    hidden: Mapping[str, list[int]]

    @property
    def tokens(self) -> list[int]:
        """Its token ids, which take much longer to compute than the text."""
        if not self.hidden:
            return encode(self.text_format.tokenizer, self.text)
        return _encoded_with(self.text_format, self.text, self.hidden)


def rendered_prompt(
    text_format: ModelTextFormat,
    messages: Sequence[Mapping[str, Any]],
    param: str,
    tools: Sequence[Mapping[str, Any]] = (),
    limits: RenderLimits = ANYWHERE,
) -> RenderedPrompt:
    """Render up to the assistant's turn. Raises `ValidationFailed` on `param` for characters that cannot be plain
    text.
    """
    markers = text_format.special_texts
    texts = [*texts_within([list(messages), list(tools)])]
    if markers is None or not any(map(markers.search, texts)):
        _refuse_other_spellings(text_format, texts, param)
        text = _rendered(text_format.template, messages, tools, param, limits)
        return RenderedPrompt(text_format, text, {})

    # Render with a placeholder character for each special token in the caller's text, then encode its text by itself.
    specials = sorted({special for text in texts for special in markers.findall(text)})
    used = set("".join(texts))
    free = (chr(code) for code in PRIVATE_USE if chr(code) not in used)
    placeholders = dict(zip(specials, free, strict=False))
    turns, listed = (_replaced(list(value), markers, placeholders) for value in (messages, tools))
    _refuse_other_spellings(text_format, [*texts_within([turns, listed])], param)

    text = _rendered(text_format.template, turns, listed, param, limits)
    hidden = {
        mark: _encoded_as_text(text_format, special, param)
        for special, mark in placeholders.items()
    }
    return RenderedPrompt(text_format, text, hidden)


def _encoded_with(
    text_format: ModelTextFormat, rendered: str, hidden: Mapping[str, list[int]]
) -> list[int]:
    """Encode a whole text, replacing the tokens of each character in `hidden` by other tokens."""
    encoding = encoding_of(text_format.tokenizer, rendered)
    tokens: list[int] = []
    done = 0
    for place, character in enumerate(rendered):
        if character not in hidden:
            continue
        first, after = (token_at(encoding, one, len(rendered)) for one in (place, place + 1))
        if first < done or any(
            encoding.token_to_chars(one) != (place, place + 1) for one in range(first, after)
        ):
            # A token has joined the character with what stands beside it, so each piece is encoded by itself.
            pieces = re.split(f"([{''.join(hidden)}])", rendered)
            return [
                token
                for piece in pieces
                for token in hidden.get(piece, ()) or encode(text_format.tokenizer, piece)
            ]
        tokens += [*encoding.ids[done:first], *hidden[character]]
        done = after
    return [*tokens, *encoding.ids[done:]]


def _rendered(
    template: PromptTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    param: str,
    limits: RenderLimits,
) -> str:
    try:
        return template.render(messages, add_generation_prompt=True, tools=tools, limits=limits)
    except TemplateFailed as error:
        if isinstance(error, TemplateTooSlow) and limits is not ANYWHERE:
            raise
        raise field_error(param, f"cannot be rendered: {error}") from error


def _replaced(value: Any, markers: "re.Pattern[str]", placeholders: Mapping[str, str]) -> Any:
    """A value of JSON with another text for each special token in its texts and names."""
    if isinstance(value, str):
        return markers.sub(lambda match: placeholders[match[0]], value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {
            _replaced(name, markers, placeholders): _replaced(one, markers, placeholders)
            for name, one in items
        }
    if isinstance(value, list):
        return [_replaced(one, markers, placeholders) for one in cast("list[Any]", value)]
    return value


def _encoded_as_text(text_format: ModelTextFormat, special: str, param: str) -> list[int]:
    """Encode a special token's text in parts that are no special tokens, so that they spell the same text."""
    markers = text_format.special_texts
    for parts in ([special[:1], special[1:]], list(special)):
        if markers is None or not any(map(markers.search, parts)):
            return [token for part in parts for token in _encoded_within(text_format, part)]
    raise field_error(param, "holds a special token of the model, which is a single character")


def _encoded_within(text_format: ModelTextFormat, part: str) -> list[int]:
    """Encode a part of a text: some tokenizers put a space before the first word of a text."""
    before = chr(PRIVATE_USE[0])
    tokens, start = (
        encode(text_format.tokenizer, before + part),
        encode(text_format.tokenizer, before),
    )
    return (
        tokens[len(start) :]
        if tokens[: len(start)] == start
        else encode(text_format.tokenizer, part)
    )


def _refuse_other_spellings(text_format: ModelTextFormat, texts: Sequence[str], param: str) -> None:
    """Refuse special tokens that appear only after the tokenizer's normalization, e.g. in full-width letters."""
    normalizer: Any = text_format.tokenizer.normalizer
    markers = text_format.normalized_special_texts
    if normalizer is None or markers is None:
        return
    if any(markers.search(normalizer.normalize_str(text)) for text in texts):
        raise field_error(param, "holds a special token of the model in another spelling")
