"""The cheap checks of a cell: what is learnt and what is served, token by token, beside transformers."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import save_file
from transformers import AutoTokenizer

from tests.support.zoo.conversations import CONVERSATIONS, MAY_BE_REFUSED, RAW_PROMPTS, Conversation
from tests.support.zoo.product import Ours, Refused, Row
from tests.support.zoo.template_kinds import TemplateKind
from tests.support.zoo.tokenizer_kinds import TokenizerKind

# More than any tokenizer of the zoo has.
VOCABULARY = 1024
# Where a refusal says which line is meant.
PLACE = re.compile(
    r"^([\w ]+\.jsonl: lines? [\d, ]+( and \d+ more)?|the base model cannot be used): "
)


@dataclass(frozen=True)
class Texts:
    """The result of a cell: lines that begin with the name of a conversation."""

    # Problems: each is neither right nor refused in a sentence that says why.
    faults: tuple[str, ...]
    # The reasons of refusals, without the places in files.
    refusals: tuple[str, ...]
    # Whether no conversation is learnt.
    is_refused: bool


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
        except Exception as error:  # noqa: BLE001 - templates raise anything
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
    # The first token that the model has to write.
    start: int
    # Behind the token that ends the turn.
    end: int
    # Whether the template writes such a token.
    has_end: bool


def save_texts(folder: Path, tokenizer: TokenizerKind, template: TemplateKind) -> None:
    """Write a checkpoint whose weights nobody reads."""
    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizer.save(folder, template.marks, **template.settings)
    template.save(folder)
    end = (
        made.token_to_id(tokenizer.tokens["eos_token"]) if "eos_token" in tokenizer.tokens else None
    )
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
        # The bytes of a character may be several tokens, all with its place.
        last = max((i for i in range(start, len(ids)) if offsets[i][0] < position), default=start)
        found.append(Turn(number, prompt, start, ends[0] + 1 if ends else last + 1, bool(ends)))
    return found


def check_texts(
    folder: Path, rows: Path, tokenizer: TokenizerKind, template: TemplateKind
) -> Texts:
    """Compare all conversations and raw prompts of one cell with transformers."""
    save_texts(folder, tokenizer, template)
    judge, ours = judge_of(folder, template), Ours(folder, rows)
    faults: list[str] = []
    reasons: list[str] = []
    # Of conversations that transformers refuses too.
    unasked: list[str] = []
    learnt = False
    for name in CONVERSATIONS:
        whole, turns = _rendered(judge, name)
        try:
            problems = [*_problems(judge, ours, name, whole, turns)]
        except Refused as refusal:
            reason = PLACE.sub("", str(refusal))
            (reasons if whole else unasked).append(reason)
            expected = tokenizer.refused or template.refused.get(name, template.refused.get(""))
            allowed = MAY_BE_REFUSED.get(name)
            # Where a prompt does not begin the whole conversation, no answer can be learnt as it is asked for.
            can_be_right = bool(whole) and all(_begins(turn, whole) for turn in turns)
            if expected is None and can_be_right and not (allowed and allowed in reason):
                problems = [f"is refused: {refusal}"]
            elif expected is not None and expected not in reason:
                problems = [f"is refused for another reason: {refusal}"]
            else:
                problems = []
        else:
            learnt |= bool(whole)
            if tokenizer.refused is not None:
                problems.append("is not refused")
        faults += [f"{name}: {problem}" for problem in problems]
    if tokenizer.refused is None:
        faults += [f"raw prompt: {problem}" for problem in _wrong_raw_prompts(judge, ours)]
    shown = reasons if learnt else reasons + unasked
    return Texts(tuple(faults), tuple(dict.fromkeys(shown)), not learnt)


def _wrong_raw_prompts(judge: Judge, ours: Ours) -> Iterator[str]:
    for text in RAW_PROMPTS:
        try:
            if ours.raw_prompt(text) != judge.tokenizer(text)["input_ids"]:
                yield f"other tokens of {text!r}"
        except Refused:
            # The whole base is, and says so above.
            return


def _rendered(judge: Judge, name: str) -> tuple[list[int], list[Turn]]:
    """A conversation as transformers reads it; nothing where it refuses to."""
    try:
        return judge.ids(CONVERSATIONS[name], asks=False), turns_of(judge, CONVERSATIONS[name])
    except NoSuchPrompt:
        return [], []


def _begins(turn: Turn, whole: list[int]) -> bool:
    return whole[: turn.start] == turn.prompt


def _problems(
    judge: Judge, ours: Ours, name: str, whole: list[int], turns: list[Turn]
) -> Iterator[str]:
    """Yield the problems of a conversation. Raises `Refused`."""
    conversation, rows = CONVERSATIONS[name], ours.learnt(name)
    if conversation[0]["role"] == "assistant" and len(rows) == len(turns) + 1:
        # A turn that no prompt comes before may be a row too; transformers says nothing of it.
        rows = rows[1:]
    if not whole:
        yield "transformers refuses it, and it is learnt"
    elif len(rows) == 1:
        yield from _wrong_row(rows[0], conversation, turns, judge, ours)
        yield from _wrong_prompts(rows * len(turns), conversation, turns, ours)
    elif len(rows) != len(turns):
        yield f"{len(rows)} rows are learnt of {len(turns)} turns"
    else:
        # A template that writes earlier turns otherwise once later ones follow: each turn is a row of its own.
        for row, turn in zip(rows, turns, strict=True):
            part = conversation[: turn.number + 1]
            yield from _wrong_row(row, part, turns_of(judge, part)[-1:], judge, ours)
        yield from _wrong_prompts(rows, conversation, turns, ours)


def _wrong_prompts(
    rows: list[Row], conversation: Conversation, turns: list[Turn], ours: Ours
) -> Iterator[str]:
    """Yield the problems of the prompts of turns, each learnt in its row."""
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
    """Yield the differences from tokens and mask of transformers; nothing has to follow the last target."""
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
    if eos is None and not any(ours.end_texts):
        yield "nothing can end an answer, and it is not refused"
        return
    runs = _runs(row.mask)
    runs = runs[-len(turns) :]
    if len(runs) != len(turns):
        yield f"{len(runs)} answers are learnt instead of {len(turns)}"
    for start, end in runs:
        text = judge.tokenizer.decode(row.ids[start:end])
        if row.ids[end - 1] != eos and not any(
            one and (text.endswith(one) or text.rstrip().endswith(one)) for one in ours.end_texts
        ):
            yield "the answer's end is not learnt"


def _runs(mask: list[bool]) -> list[tuple[int, int]]:
    """The places where stretches of targets begin and end."""
    edges = np.flatnonzero(np.diff([0, *mask, 0])).tolist()
    return [*zip(edges[::2], edges[1::2], strict=True)]


def _difference(found: list[bool], wanted: list[bool]) -> str:
    more = sum(a and not b for a, b in zip(found, wanted, strict=True))
    fewer = sum(b and not a for a, b in zip(found, wanted, strict=True))
    return f"{more} tokens too many and {fewer} too few are learnt"
