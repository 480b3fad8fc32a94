"""One request for tokens, and its state inside a replica. Depends on neither torch nor the socket.

`replica_client` sends a `GenerateRequest`; `scheduler` and `engine` run the `Sequence` made from it.
"""

import random
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

# Temperatures below this are greedy. They could choose another token only if two logits were all
# but equal, and dividing by them leaves the range of numbers.
GREEDY_BELOW = 1e-6


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


class TokenScore(NamedTuple):
    """The log probability of a token, and the likeliest tokens at its place."""

    token: int
    # Natural logarithm of the probability that the model itself gives it, whatever the temperature.
    logprob: float
    # Pairs of token id and log probability, the likeliest first; as many as the request asked for.
    top: Items[Items[float]]


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A prompt to continue, the adapter to use, and how to sample. The caller has checked the ranges."""

    # Token ids of the prompt.
    tokens: tuple[int, ...]
    # New tokens at most; 0 only reads the prompt.
    max_tokens: int
    # Name of the adapter; None uses the base model.
    adapter: str | None = None
    # Sampling temperature; 0, or anything below `GREEDY_BELOW`, is greedy.
    temperature: float = 0.0
    top_p: float = 1.0
    # Seed of the draws; None takes the operating system's randomness.
    seed: int | None = None
    # Tokens that end the generation and are not part of it.
    stop_tokens: tuple[int, ...] = ()
    # Waiting queue, e.g. a deployment id: the queues of an owner take turns. Empty: one queue per adapter.
    queue: str = ""
    # Grammar that the answer follows (`grammar.py`); None leaves it free.
    grammar: str | None = None
    # Id of the tenant: while requests wait, owners take turns, however many queues each of them has.
    owner: str = ""
    # Likeliest tokens to report beside each new token's own log probability; None reports nothing.
    logprobs: int | None = None
    # The same for the tokens of the prompt, from the second on.
    prompt_logprobs: int | None = None
    # Nobody waits for it: it joins the running batch only while no other request waits.
    is_background: bool = False

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature < GREEDY_BELOW


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt with the tokens generated for it so far."""

    id: str
    request: GenerateRequest
    # New tokens at most: as requested, or as many as the context still holds.
    token_limit: int
    generated: list[int] = field(default_factory=list)
    # Row of the KV cache that it occupies; -1 while it waits.
    slot: int = -1
    # Prompt tokens already in the KV cache; a long prompt is prefilled in chunks.
    cached: int = 0
    # The tokens to prefill: those of the request and, after `restart`, those generated before it.
    prompt: tuple[int, ...] = field(init=False)
    rng: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Give each request its own randomness: a neighbour in the batch cannot change its draws."""
        self.prompt = self.request.tokens
        self.rng = random.Random(self.request.seed)  # noqa: S311 (sampling, not secrets)

    def restart(self) -> None:
        """Wait again, to have all tokens known so far prefilled."""
        self.prompt = (*self.request.tokens, *self.generated)
        self.cached, self.slot = 0, -1

    @property
    def length(self) -> int:
        """Number of tokens known so far: prompt and generated."""
        return len(self.request.tokens) + len(self.generated)

    @property
    def answered(self) -> list[int]:
        """The tokens generated after `prompt`."""
        return self.generated[len(self.prompt) - len(self.request.tokens) :]

    @property
    def max_length(self) -> int:
        """Number of tokens when it has generated as many as it may."""
        return len(self.request.tokens) + self.token_limit

    @property
    def uncached(self) -> int:
        """Number of prompt tokens that are not in the KV cache yet."""
        return len(self.prompt) - self.cached

    @property
    def is_prefilling(self) -> bool:
        """Whether a part of its prompt is not in the KV cache yet."""
        return self.uncached > 0

    def scored_by(self, chunk: int) -> tuple[int, ...]:
        """The prompt's tokens whose log probabilities become known by prefilling its next `chunk` tokens."""
        if self.request.prompt_logprobs is None or self.generated:
            return ()
        return self.request.tokens[self.cached + 1 : self.cached + chunk + 1]

    def append(self, token: int) -> FinishReason | None:
        """Add the next token and say whether it ends the sequence; a stop token is not kept."""
        if token in self.request.stop_tokens:
            return FinishReason.STOP
        self.generated.append(token)
        return FinishReason.LENGTH if len(self.generated) >= self.token_limit else None
