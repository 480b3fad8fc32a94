"""What a tuned model said when its training ended: whoever serves it proves to read and to compute the same.

A small file beside the adapter, written by `training/run.py`. The service compares the tokens that a probe's messages
become (`service/deployment_keeper.py`), the replica the logits that follow them (`serving/parity.py`). Knows no model.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tuneship.security.sealed_files import read_plain, write_sealed
from tuneship.template import PromptTemplate, TemplateFailed

PARITY_FILE = "parity.json"
# Logits may differ by so much of their own standard deviation, by the coarser of the two number
# formats.
#
# Measured on tiny random models of nine families: 1e-6 where both are float32, 0.01 to 0.1 where
# serving is bfloat16; a base model whose weights are 3 % larger is at 0.05 to 0.3, an adapter at
# 1.5 times its scale at 0.2 to 1.
SHARE_OF_SPREAD = {"float32": 0.01, "bfloat16": 0.15}
# Role and content. Fixed texts: nothing of a dataset is stored beside the adapter.
TALKS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Which of these comes first: 17, 4 or 256?"),),
    (("user", "Name a colour."), ("assistant", "blue"), ("user", "Name another one.")),
)


@dataclass(frozen=True)
class Probe:
    """One prompt and some of the logits after its last token."""

    messages: list[dict[str, str]]
    prompt: list[int]
    """Token ids, cut to the context length."""
    tokens: list[int]
    """Ids whose logits are told: the most likely ones, and others spread over the vocabulary."""
    logits: list[float]
    spread: float
    """Standard deviation of all the logits."""

    def distance(self, logits: Sequence[float]) -> float:
        """Root of the mean squared difference to `logits` (of `tokens`), as a share of the spread."""
        squares = [(a - b) ** 2 for a, b in zip(self.logits, logits, strict=True)]
        return math.sqrt(sum(squares) / len(squares)) / max(self.spread, 1e-9)


@dataclass(frozen=True)
class Parity:
    """All probes of a model."""

    dtype: str
    """Of the weights while it was tuned, e.g. `float32`."""
    probes: list[Probe]

    def tolerance(self, dtype: str) -> float:
        """For `Probe.distance`, when it is served in `dtype`."""
        return max(SHARE_OF_SPREAD.get(name, 0.0) for name in (dtype, self.dtype))

    def save(self, directory: Path, key: str | None = None) -> None:
        """Write the file, sealed with a key."""
        text = json.dumps(asdict(self), ensure_ascii=False)
        write_sealed(directory / PARITY_FILE, key, f"{text}\n".encode())

    @classmethod
    def load(cls, directory: Path, key: str | None = None) -> "Parity | None":
        """None when the model has no such file (it was tuned elsewhere). Raises ValueError when it is damaged."""
        try:
            told = json.loads(read_plain(directory / PARITY_FILE, key))
        except FileNotFoundError:
            return None
        try:
            return cls(told["dtype"], [Probe(**probe) for probe in told["probes"]])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{PARITY_FILE} is not understood") from error


def prompts(
    template: PromptTemplate, encode: Callable[[str], list[int]], context_length: int
) -> list[tuple[list[dict[str, str]], list[int]]]:
    """Messages and token ids of each probe that the template takes; an answer still has room behind them."""
    found: list[tuple[list[dict[str, str]], list[int]]] = []
    for talk in TALKS:
        messages = [{"role": role, "content": content} for role, content in talk]
        try:
            tokens = prompt_tokens(template, encode, messages)[: context_length - 1]
        except TemplateFailed:
            continue
        if tokens:
            found.append((messages, tokens))
    return found


def prompt_tokens(
    template: PromptTemplate,
    encode: Callable[[str], list[int]],
    messages: Sequence[Mapping[str, object]],
) -> list[int]:
    """What the model reads before it answers. Raises TemplateFailed."""
    return encode(template.render(messages, add_generation_prompt=True))


def reads_alike(
    parity: Parity, template: PromptTemplate, encode: Callable[[str], list[int]]
) -> bool:
    """Whether the probes' messages become the tokens that they were in training."""
    try:
        return all(
            prompt_tokens(template, encode, probe.messages)[: len(probe.prompt)] == probe.prompt
            for probe in parity.probes
        )
    except TemplateFailed:
        return False
