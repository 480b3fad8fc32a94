"""The log probabilities of an answer's tokens in the contract's form, given out together with their text."""

import codecs
from collections import deque
from collections.abc import Sequence
from typing import Any

from tuneship.contract.generation import LikelyToken, TokenLogprob
from tuneship.service.catalogues.token_texts import TokenTexts
from tuneship.serving.replica_client import TokenScore

# Made without checks, and with as few objects as possible: the garbage collector looks at all of them again and again.
LIKELY = set(LikelyToken.model_fields)
SCORED = set(TokenLogprob.model_fields)


class AnswerLogprobs:
    """Takes the scores of an answer's tokens, and gives them out when the text that they begin is certain."""

    def __init__(self, texts: TokenTexts) -> None:
        """Begin before the first token."""
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # With the number of characters before each token.
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self._characters = 0
        # All that were given out.
        self.given: list[TokenLogprob] = []

    def add(self, score: TokenScore) -> None:
        """Take the score of the next token."""
        self._waiting.append((self._characters, logprob_of(self._texts, score)))
        if not self._texts.is_special(score.token):
            content = self._texts.bytes_of(score.token)
            self._characters += len(self._decoder.decode(content))

    def release(self, characters: int, *, is_last: bool = False) -> list[TokenLogprob]:
        """The tokens that begin in the first `characters` of the text; `is_last`: all that are left."""
        released: list[TokenLogprob] = []
        while self._waiting and (is_last or self._waiting[0][0] < characters):
            released.append(self._waiting.popleft()[1])
        self.given += released
        return released


def logprob_of(texts: TokenTexts, score: TokenScore) -> TokenLogprob:
    """A score in the contract's form."""
    top = [
        LikelyToken.model_construct(LIKELY, **_likely(texts, int(token), logprob))
        for token, logprob in score.top
    ]
    return TokenLogprob.model_construct(
        SCORED, **_likely(texts, score.token, score.logprob), top=top
    )


def prompt_logprobs(
    texts: TokenTexts, tokens: Sequence[int], scores: Sequence[TokenScore]
) -> list[TokenLogprob]:
    """The log probabilities of all tokens of a prompt; the first has none."""
    first = TokenLogprob(**_likely(texts, tokens[0], None), top=[])
    return [first, *(logprob_of(texts, score) for score in scores)]


def _likely(texts: TokenTexts, token: int, logprob: float | None) -> dict[str, Any]:
    return {
        "id": token,
        "token": texts.text_of(token),
        "bytes": texts.numbers_of(token),
        "logprob": logprob,
    }
