"""The cheap checks of a cell: what is learnt and what is served, token by token, beside transformers."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from tests.support.zoo.conversations import CONVERSATIONS, RAW_PROMPTS, Conversation
from tests.support.zoo.product import Ours, Refused, Row
from tests.support.zoo.template_kinds import TemplateKind
from tests.support.zoo.tokenizer_kinds import TokenizerKind

# More than any tokenizer of the zoo has.
VOCABULARY = 1024


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong in a cell."""

    conversation: str
    problem: str

    def __str__(self) -> str:
        return f"{self.conversation}: {self.problem}"


@dataclass(frozen=True)
class Texts:
    """The result of a cell."""

    faults: tuple[Fault, ...] = ()
    refusals: tuple[Fault, ...] = ()
    """What was refused although transformers renders it, and why."""


class NoSuchPrompt(Exception):
    """transformers refuses to render the messages."""


@dataclass(frozen=True)
class Judge:
    """A checkpoint as transformers reads it."""

    tokenizer: Any
    template: str | None

    def text(self, messages: Conversation, *, asks: bool) -> str:
        return self._applied(messages, asks, tokenize=False)

    def ids(self, messages: Conversation, *, asks: bool) -> list[int]:
        return self._applied(messages, asks, return_dict=False)

    def marked(self, messages: Conversation) -> list[int]:
        """The mask of a template with `{% generation %}` blocks; all zeros for others."""
        return self._applied(messages, False, return_assistant_tokens_mask=True)["assistant_masks"]

    def _applied(self, messages: Conversation, asks: bool, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                messages, chat_template=self.template, add_generation_prompt=asks, **options
            )
        except Exception as error:
            raise NoSuchPrompt(type(error).__name__) from None

    @cached_property
    def specials(self) -> set[int]:
        known = self.tokenizer.added_tokens_decoder.items()
        return {number for number, token in known if token.special}


@dataclass(frozen=True)
class Turn:
    """A turn of the assistant, as the judge reads the whole conversation."""

    number: int
    prompt: list[int]
    start: int
    """The first token that the model has to write."""
    end: int
    """Behind the token that ends the turn."""
    has_end: bool
    """Whether the template writes such a token."""


def save_texts(folder: Path, tokenizer: TokenizerKind, template: TemplateKind) -> None:
    """Write a checkpoint whose weights nobody reads."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer.save(folder, template.marks, **template.settings)
    template.save(folder)
    end = made.token_to_id(tokenizer.tokens["eos_token"]) if "eos_token" in tokenizer.tokens else None
    config = {
        "model_type": tokenizer.model_type, "vocab_size": VOCABULARY, "eos_token_id": end,
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"model.layers.0.mlp.up_proj.weight": np.zeros((1, 1))}, folder / "model.safetensors")


def judge_of(folder: Path, template: TemplateKind) -> Judge:
    """The checkpoint as transformers loads it."""
    # It remarks on foreign tokenizers that it loads.
    transformers.logging.set_verbosity_error()
    return Judge(AutoTokenizer.from_pretrained(folder), template.for_transformers)


def turns_of(judge: Judge, conversation: Conversation) -> list[Turn]:
    """Every turn of the assistant. Raises `NoSuchPrompt` where there is none that a prompt comes before."""
    text = judge.text(conversation, asks=False)
    encoded = judge.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    found: list[Turn] = []
    position = 0
    for number, message in enumerate(conversation):
        if message["role"] != "assistant" or number == 0:
            continue
        prompt = judge.ids(conversation[:number], asks=True)
        content = message["content"].strip()
        place = text.find(content, position)
        if place < 0:
            # Some templates drop the reasoning of an earlier turn.
            content = content.split("</think>")[-1].strip()
            place = text.find(content, position)
        position = place + len(content)
        # Until the next turn begins, or behind all.
        until = len(text)
        if number + 1 < len(conversation):
            until = text.find(conversation[number + 1]["content"].strip(), position)
        start = len(prompt)
        behind = [i for i in range(start, len(ids)) if position <= offsets[i][0] < until]
        ends = [i for i in behind if ids[i] in judge.specials]
        # The first token behind the prompt's that starts at or behind the end of the answer.
        last = next((i for i in range(start, len(ids)) if offsets[i][1] >= position), len(ids) - 1)
        found.append(Turn(number, prompt, start, ends[0] + 1 if ends else last + 1, bool(ends)))
    return found


def check_texts(
    folder: Path, rows: Path, tokenizer: TokenizerKind, template: TemplateKind
) -> Texts:
    """Compare all conversations and raw prompts of one cell with transformers."""
    save_texts(folder, tokenizer, template)
    judge, ours = judge_of(folder, template), Ours(folder, rows)
    faults: list[Fault] = []
    refusals: list[Fault] = []
    for name in CONVERSATIONS:
        try:
            problems = [*_problems(judge, ours, name)]
        except Refused as refusal:
            refusals.append(Fault(name, str(refusal)))
        else:
            faults += [Fault(name, problem) for problem in problems]
    for text in RAW_PROMPTS:
        try:
            if ours.raw_prompt(text) != judge.tokenizer(text)["input_ids"]:
                faults.append(Fault("raw prompt", "other tokens"))
        except Refused as refusal:
            refusals.append(Fault("raw prompt", str(refusal)))
    return Texts(tuple(faults), tuple(refusals))


def _problems(judge: Judge, ours: Ours, name: str) -> Iterator[str]:
    """What is wrong with a conversation. Raises `Refused` where transformers has a right answer."""
    conversation = CONVERSATIONS[name]
    try:
        whole = judge.ids(conversation, asks=False)
        turns = turns_of(judge, conversation)
    except NoSuchPrompt:
        whole, turns = [], []
    # Where the prompt does not begin the whole conversation, no answer can be learnt as it is asked for.
    can_be_right = turns and all(whole[: turn.start] == turn.prompt for turn in turns)
    try:
        rows = ours.learnt(name)
    except Refused:
        if can_be_right:
            raise
        return
    if not whole:
        yield "transformers refuses it, and it is learnt"
        return
    if not can_be_right:
        yield "it is learnt although its prompts do not begin it"
        return
    if len(rows) == 1:
        yield from _wrong_row(rows[0], conversation, turns, judge, ours)
        yield from _wrong_prompts(rows * len(turns), conversation, turns, ours)
        return
    # A template that writes earlier turns otherwise once later ones follow: each turn is a row of its own.
    if len(rows) != len(turns):
        yield f"{len(rows)} rows are learnt of {len(turns)} turns"
        return
    for row, turn in zip(rows, turns, strict=True):
        part = conversation[: turn.number + 1]
        last = turns_of(judge, part)[-1:]
        yield from _wrong_row(row, part, last, judge, ours)
    yield from _wrong_prompts(rows, conversation, turns, ours)


def _wrong_prompts(
    rows: list[Row], conversation: Conversation, turns: list[Turn], ours: Ours
) -> Iterator[str]:
    """What is wrong with the prompts of turns, each learnt in its row."""
    for row, turn in zip(rows, turns, strict=True):
        served, number = ours.prompt(conversation[: turn.number]), turn.number + 1
        if turn.has_end and served != turn.prompt:
            yield f"the prompt of turn {number} is another"
        if served != row.ids[: len(served)] or row.mask[len(served) - 1]:
            yield f"the prompt of turn {number} does not begin what is learnt"
        elif not row.mask[len(served)]:
            yield f"what follows the prompt of turn {number} is not learnt"


def _wrong_row(
    row: Row, conversation: Conversation, turns: list[Turn], judge: Judge, ours: Ours
) -> Iterator[str]:
    """What differs from the tokens and the mask that transformers gives; nothing has to follow the last target."""
    whole, marked = judge.ids(conversation, asks=False), judge.marked(conversation)
    eos = judge.tokenizer.eos_token_id
    if all(turn.has_end for turn in turns):
        if row.ids != whole[: len(row.ids)]:
            yield "other tokens are learnt"
            return
        wanted = [False] * len(row.ids)
        for turn in turns:
            wanted[turn.start : turn.end] = [True] * (turn.end - turn.start)
        if len(wanted) > len(row.ids):
            yield "the end of the last turn is missing"
        # Whether a turn is learnt that no prompt comes before, transformers does not say.
        first = turns[0].start if conversation[0]["role"] == "assistant" else 0
        accepted = [wanted, *([marked] if any(marked) else [])]
        if all(row.mask[first:] != one[first : len(row.ids)] for one in accepted):
            yield _difference(row.mask[first:], wanted[first:])
        return
    # The template writes no token at the end of a turn: each is followed by the tokenizer's, or ends in a text.
    if eos is None and ours.stop_text is None:
        yield "nothing can end an answer, and it is not refused"
        return
    runs = _runs(row.mask)
    runs = runs[-len(turns) :]
    if len(runs) != len(turns):
        yield f"{len(runs)} answers are learnt instead of {len(turns)}"
    for start, end in runs:
        text = judge.tokenizer.decode(row.ids[start:end])
        if row.ids[end - 1] != eos and not (ours.stop_text and text.endswith(ours.stop_text)):
            yield "the answer's end is not learnt"


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """Where stretches of targets begin and end."""
    edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
    return [*zip(edges[::2], edges[1::2], strict=True)]


def _difference(found: list[bool], wanted: list[bool]) -> str:
    more = sum(a and not b for a, b in zip(found, wanted, strict=True))
    fewer = sum(b and not a for a, b in zip(found, wanted, strict=True))
    return f"{more} tokens too many and {fewer} too few are learnt"
