"""The parity file: fixed prompts with logits and greedy tokens, saved beside an adapter when its training ends.

Before an adapter serves, the service compares the tokens of these prompts
(`service/deployments/deployment_keeper.py`) and the replica the logits and greedy tokens after them
(`serving/parity_check.py`), so that a model is served as it was tuned.
Written by `training/parity_notes.py`. Knows no model.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from tuneship.prompts.template import PromptTemplate, TemplateFailed
from tuneship.security.sealed_files import read_plain, write_sealed

PARITY_FILE = "parity.json"
# The fields of a probe about its greedy answer.
# The allowed difference of logits in standard deviations of the logits, by the coarser of the two number formats.
#
# Measured on tiny random models of nine families: 1e-6 where both are float32, 0.01 to 0.1 where serving is bfloat16.
# A base model with weights 3 % larger differs by 0.05 to 0.3, an adapter at 1.5 times its scale by 0.2 to 1.
#
# Weights of 8 bits with one scale per row moved the logits by 0.01 to 0.03 on tiny models and 0.05 to 0.33 on a real
# one, weights of 4 bits in groups by 0.14 to 0.64 and 0.05 to 0.09. So another base model is noticed with quantised
# weights (tests/unit/serving/test_quantised.py), and a slightly wrong scale of an adapter is not.
TOLERANCES = {"float32": 0.01, "bfloat16": 0.15, "int8": 0.5, "int4": 0.9}
# Tokens of each greedy answer.
GREEDY_TOKENS = 20
# Rounding decides between two tokens whose logits are nearly equal, so another token is a difference only where the
# two programs differ about the lead of one over the other by more than this many tolerances. Of a random model with
# weights of 8 bits, the worst lead of 40 moved by 8 times the root mean square of all logits' differences. Tokens that
# have nothing to do with the expected ones differ by 3 to 4 standard deviations of the logits: such an answer is
# noticed in float32, bfloat16 and the formats of exports; in int8 and int4 the first token's logits alone are.
CHOICE_TOLERANCES = 10
# What a file may hold, since the replica of all tenants computes it: more than any file of ours does.
MAX_BYTES, MAX_PROBES, MAX_TOKENS, MAX_CHARACTERS = 1 << 20, 4, 8192, 1000
ANY_DAY = datetime(2024, 7, 26)  # noqa: DTZ001 - a local date, as templates write it
# Role and content of each turn. Fixed texts, so that no text of a dataset is stored beside the adapter.
TALKS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("user", "Which of these comes first: 17, 4 or 256?"),),
    (("user", "Name a colour."), ("assistant", "blue"), ("user", "Name another one.")),
)


@dataclass(frozen=True)
class Probe:
    """One prompt and some of the logits after its last token."""

    messages: list[dict[str, str]]
    # Token ids, cut to the context length.
    prompt: list[int]
    # The token ids of `logits`: the most likely ones, and others spread over the vocabulary.
    tokens: list[int]
    logits: list[float]
    # Standard deviation of all the logits.
    spread: float
    # The first tokens of the greedy answer, and by how much the logit of each leads that of the next likely token, in
    # standard deviations of the logits.
    greedy: list[int]
    leads: list[float]

    @property
    def is_small(self) -> bool:
        """Whether it is no larger than one of ours can be."""
        texts = [message["content"] for message in self.messages]
        tokens = (self.prompt, self.tokens, self.greedy)
        return sum(map(len, texts)) <= MAX_CHARACTERS and max(map(len, tokens)) <= MAX_TOKENS

    def differing_choice(
        self, choices: Sequence[int], gaps: Sequence[float], tolerance: float
    ) -> int | None:
        """The index of the first token that another program chooses differently beyond rounding; None if none.

        `choices` are its likeliest tokens where the answer so far is `greedy`; `gaps` say by how much the logit of the
        token in `greedy` is below that of the chosen one, in standard deviations of its logits.
        """
        compared = zip(self.greedy, self.leads, choices, gaps, strict=True)
        for place, (expected, lead, chosen, gap) in enumerate(compared):
            if chosen != expected and not lead + gap <= CHOICE_TOLERANCES * tolerance:
                return place
        return None

    def distance(self, logits: Sequence[float]) -> float:
        """Root mean squared difference to `logits`, at `tokens`, divided by the spread."""
        squares = [(a - b) ** 2 for a, b in zip(self.logits, logits, strict=True)]
        return math.sqrt(sum(squares) / len(squares)) / max(self.spread, 1e-9)


@dataclass(frozen=True)
class Parity:
    """All probes of a tuned model."""

    # The number format of the weights in training, e.g. `float32`.
    dtype: str
    probes: list[Probe]

    def tolerance(self, dtype: str) -> float:
        """The largest allowed `Probe.distance` of a replica that computes in `dtype`."""
        return max(TOLERANCES.get(name, 0.0) for name in (dtype, self.dtype))

    def save(self, directory: Path, key: str | None = None) -> None:
        """Write the file; if `key` is given, seal it."""
        text = json.dumps(asdict(self), ensure_ascii=False)
        write_sealed(directory / PARITY_FILE, key, f"{text}\n".encode())

    @classmethod
    def load(cls, directory: Path, key: str | None = None) -> "Parity | None":
        """Read the file; None when a model that was tuned elsewhere has none. Raises ValueError when it is damaged."""
        try:
            if (directory / PARITY_FILE).stat().st_size > MAX_BYTES:
                raise ValueError(f"{PARITY_FILE} is too large")
            fields = json.loads(read_plain(directory / PARITY_FILE, key))
        except FileNotFoundError:
            return None
        except RecursionError as error:
            raise ValueError(f"{PARITY_FILE} is not understood") from error
        try:
            probes = [Probe(**probe) for probe in fields["probes"]]
            if any(len(probe.greedy) != len(probe.leads) for probe in probes):
                raise ValueError(f"{PARITY_FILE} is damaged")
            if len(probes) > MAX_PROBES or not all(probe.is_small for probe in probes):
                raise ValueError(f"{PARITY_FILE} is too large")
            return cls(fields["dtype"], probes)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{PARITY_FILE} is not understood") from error


def prompts(
    template: PromptTemplate, encode: Callable[[str], list[int]], context_length: int
) -> list[tuple[list[dict[str, str]], list[int]]]:
    """Messages and token ids of each probe that the template accepts."""
    accepted: list[tuple[list[dict[str, str]], list[int]]] = []
    for talk in TALKS:
        messages = [{"role": role, "content": content} for role, content in talk]
        try:
            # The context has room for one token of an answer.
            room = min(context_length - 1, MAX_TOKENS)
            tokens = prompt_tokens(template, encode, messages)[:room]
        except TemplateFailed:
            continue
        if tokens:
            accepted.append((messages, tokens))
    return accepted


def greedy_count(prompt: Sequence[int], context_length: int) -> int:
    """How many tokens of a greedy answer to a prompt are compared: fewer where the context ends."""
    return min(GREEDY_TOKENS, context_length - len(prompt))


def prompt_tokens(
    template: PromptTemplate,
    encode: Callable[[str], list[int]],
    messages: Sequence[Mapping[str, object]],
) -> list[int]:
    """The token ids of the prompt that ends where the assistant's answer begins. Raises TemplateFailed.

    A template with a date writes that of no day in particular, so that the tokens are the same at any time.
    """
    return encode(template.dated(ANY_DAY).render(messages, add_generation_prompt=True))


def reads_alike(
    parity: Parity, template: PromptTemplate, encode: Callable[[str], list[int]]
) -> bool:
    """Whether template and tokenizer give the probes' messages the same tokens as in training."""
    try:
        return all(
            prompt_tokens(template, encode, probe.messages)[: len(probe.prompt)] == probe.prompt
            for probe in parity.probes
        )
    except TemplateFailed:
        return False
