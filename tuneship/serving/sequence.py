"""One request for tokens, and its life inside a replica. Knows neither torch nor the socket.

`line` sends a `GenerateRequest`; `scheduler` moves the `Sequence` made from it.
"""

import random
from dataclasses import dataclass, field
from enum import StrEnum

# Temperatures below it are greedy. They could choose no other token, unless two logits are all
# but equal, and what they divide leaves the range of numbers.
GREEDY_BELOW = 1e-6


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """What to continue, with which adapter, and how to choose tokens. The caller has checked the ranges."""

    tokens: tuple[int, ...]
    max_tokens: int
    adapter: str | None = None
    """None answers with the base model."""
    temperature: float = 0.0
    """0 is greedy, and so is anything below `GREEDY_BELOW`."""
    top_p: float = 1.0
    seed: int | None = None
    """None draws from the operating system's randomness."""
    stop_tokens: tuple[int, ...] = ()
    """Any of these ends the generation and is not part of it."""
    queue: str = ""
    """What is asked, e.g. a deployment: an owner's queues take turns. Empty: one queue per adapter."""
    owner: str = ""
    """Who asks, by any mark: while requests wait, owners take turns, however many queues each of them has."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, whatever is drawn."""
        return self.temperature < GREEDY_BELOW


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way. While it runs, `row` is its place in the cache."""

    id: str
    request: GenerateRequest
    token_limit: int
    """New tokens at most: what was asked for, or what the context still holds."""
    generated: list[int] = field(default_factory=list)
    row: int = -1
    cached: int = 0
    """Prompt tokens whose keys and values are in the cache: long prompts enter in parts."""
    draws: random.Random = field(init=False)

    def __post_init__(self) -> None:
        """Own randomness per request: a neighbour in the batch cannot change the draws."""
        self.draws = random.Random(self.request.seed)  # noqa: S311 (sampling, not secrets)

    @property
    def length(self) -> int:
        """Tokens known so far: prompt and generated."""
        return len(self.request.tokens) + len(self.generated)

    @property
    def longest(self) -> int:
        """Cached tokens that it may come to need."""
        return len(self.request.tokens) + self.token_limit

    @property
    def missing(self) -> int:
        """Prompt tokens that are not in the cache yet."""
        return len(self.request.tokens) - self.cached

    @property
    def is_entering(self) -> bool:
        """A part of its prompt is not in the cache yet."""
        return self.missing > 0

    def append(self, token: int) -> FinishReason | None:
        """Take the next token; a stop token ends the sequence and is not kept."""
        if token in self.request.stop_tokens:
            return FinishReason.STOP
        self.generated.append(token)
        return FinishReason.LENGTH if len(self.generated) >= self.token_limit else None
