"""Log probabilities in the two forms of OpenAI's API. Pure."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from tuneship.contract.generation import LikelyToken, TokenLogprob
from tuneship.contract.openai.chat import ChatLikelyToken, ChatLogprobs, ChatTokenLogprob
from tuneship.contract.openai.completions import TextLogprobs


def chat_logprobs(tokens: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
    """The log probabilities of an answer to a conversation, or of a piece of it."""
    if tokens is None:
        return None
    content = [
        ChatTokenLogprob(
            **_fields(one), top_logprobs=[ChatLikelyToken(**_fields(other)) for other in one.top]
        )
        for one in tokens
    ]
    return ChatLogprobs(content=content)


def _fields(token: LikelyToken) -> dict[str, Any]:
    return {"token": token.token, "bytes": token.bytes, "logprob": token.logprob}


def text_logprobs(tokens: Sequence[TokenLogprob], offsets: Sequence[int]) -> TextLogprobs:
    """The log probabilities of a text, or of a piece of it."""
    likeliest: list[dict[str, float] | None] = []
    for one in tokens:
        found: dict[str, float] = {}
        # Several tokens may have the same text: the likeliest of them comes first, and stays.
        for other in (*one.top, one):
            if other.logprob is not None:
                found.setdefault(other.token, other.logprob)
        likeliest.append(found or None)
    return TextLogprobs(
        tokens=[one.token for one in tokens],
        token_logprobs=[one.logprob for one in tokens],
        top_logprobs=likeliest,
        text_offset=list(offsets),
    )


def offsets_of(tokens: Iterable[TokenLogprob], start: int, end: int) -> list[int]:
    """The character at which each token begins in a text, of which the tokens are the part [start, end)."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets: list[int] = []
    for token in tokens:
        offsets.append(min(start, end))
        start += len(decoder.decode(bytes(token.bytes)))
    return offsets


def prompt_offsets(tokens: Sequence[TokenLogprob], prompt: str) -> list[int]:
    """The character at which each token of a prompt begins in its text.

    A token that the tokenizer puts before the text, and that is no part of it, begins at 0.
    """
    length = len(b"".join(bytes(one.bytes) for one in tokens).decode(errors="replace"))
    ahead = length - len(prompt)
    return [max(0, one - ahead) for one in offsets_of(tokens, 0, length)]
