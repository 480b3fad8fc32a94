"""How one model reads and writes conversations: template, tokenizer, and where an answer begins and ends.

Training and serving use the same format, so a model is asked as it was tuned and stops where it learnt to stop. What
ends a turn is read off what the template renders, not off a configuration. Loads no torch. Next:
`training/objective.py` (what is learnt), `service/generation/prompts.py` (what is asked).
"""

import json
import re
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from tuneship.prompts.template import PromptTemplate, TemplateFailed
from tuneship.prompts.template_budget import PLAIN
from tuneship.prompts.text_tokenizer import (
    TokenizerFault,
    continuation,
    encode,
    encoding_of,
    special_texts,
)

# What is asked and answered to see how a template writes a turn: words that no template has.
ASKED = {"role": "user", "content": "zqask"}
ANSWER = "zqanswer"
ANSWERED = {"role": "assistant", "content": ANSWER}
# Beginnings of answers that many tokenizers join with a space or line break before them.
BEGINNINGS = ("The", "I", "a", "1", "{", "- ")
# The files that name end tokens by their ids; transformers' `generate` stops at those of the first.
ID_FILES = ("generation_config.json", "config.json")
MAX_TOKEN_ID = 2**31 - 1
NO_END = (
    "its chat template writes nothing behind an answer, and its tokenizer names no end token: "
    "name one as eos_token in tokenizer_config.json"
)


@dataclass(frozen=True)
class ModelTextFormat:
    """The text format of a base model, or of an adapter with a template of its own."""

    template: PromptTemplate
    tokenizer: Tokenizer
    # End tokens of the model's configurations, in their order.
    configured_ends: tuple[int, ...]
    # The text of the end token that was put behind each answer, since the template writes nothing there.
    appended_end: str | None = None

    @classmethod
    def of_base(cls, directory: Path, tokenizer: Tokenizer) -> "ModelTextFormat":
        """The format of a base model. Raises TemplateFailed, TokenizerFault, and ValueError for a damaged file."""
        found = cls(PromptTemplate.load(directory), tokenizer, ())
        # Of the generation configuration, of the model's, and of the tokenizer's.
        ends = [token for name in ID_FILES for token in _ends_in(directory / name)]
        text = found.template.special_tokens.get("eos_token")
        untyped: Any = tokenizer
        own = untyped.token_to_id(text) if text else None
        ends += [] if own is None else [own]
        found = replace(found, configured_ends=tuple(dict.fromkeys(ends)))
        end = found.first_end_text
        if found.fault != NO_END or end is None:
            return found
        return replace(found, template=found.template.ending_answers_with(end), appended_end=end)

    def with_template(self, template: PromptTemplate) -> "ModelTextFormat":
        """The format of an adapter that was tuned with this template, exactly as it is."""
        return ModelTextFormat(template, self.tokenizer, self.configured_ends)

    def dated(self, today: datetime) -> "ModelTextFormat":
        """The same format with a template that always writes this date."""
        return replace(self, template=self.template.dated(today))

    @property
    def first_end_text(self) -> str | None:
        """The text of the tokenizer's end token, or of the first that the configurations name."""
        text = self.template.special_tokens.get("eos_token")
        if text or not self.configured_ends:
            return text or None
        untyped: Any = self.tokenizer
        return untyped.id_to_token(self.configured_ends[0])

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end an answer: the end of a turn first, then those of the configurations."""
        end = self._turn.end
        return tuple(dict.fromkeys([*([] if end is None else [end]), *self.configured_ends]))

    @property
    def stop_text(self) -> str | None:
        """The text that ends an answer where the template's end of a turn is no token."""
        return None if self._turn.end is not None else self._turn.end_text or None

    @property
    def lead(self) -> str:
        """The text that a trained model writes before the content of an answer, e.g. the space behind `[/INST]`."""
        return self._turn.lead

    @property
    def pad(self) -> str:
        """The text that it writes between the content and the end of a turn."""
        return self._turn.pad

    @property
    def fault(self) -> str | None:
        """Why answers of this format would not end, or None."""
        if self._turn.fault is not None:
            return self._turn.fault
        if self._turn.end is None and not self._turn.end_text:
            return NO_END
        return None

    @property
    def tuning_fault(self) -> str | None:
        """Why a model of this format cannot be tuned, or None."""
        return self.fault or self._turn.tuning_fault

    @cached_property
    def special_texts(self) -> "re.Pattern[str] | None":
        """A pattern of the texts that only the template may write: special tokens, and marks that nobody named so."""
        return special_texts(self.tokenizer, self._marks)

    @cached_property
    def normalized_special_texts(self) -> "re.Pattern[str] | None":
        """A pattern of the special tokens that the tokenizer finds after normalizing the text."""
        return special_texts(self.tokenizer, self._marks, is_normalized=True)

    @cached_property
    def _marks(self) -> frozenset[int]:
        """The added tokens in the template's own text, and the tokens that end an answer."""
        turns = [{"role": "system", "content": "zqsystem"}, ASKED, ANSWERED, ASKED]
        added = self.tokenizer.get_added_tokens_decoder()
        found = set(self.stop_tokens)
        for talk in (turns, turns[1:]):
            try:
                text = self.template.render(talk, add_generation_prompt=True, limits=PLAIN)
            except TemplateFailed:
                continue
            found.update(encode(self.tokenizer, text))
        return frozenset(found & added.keys())

    @property
    def is_read(self) -> bool:
        """Whether `read` has been called."""
        is_turn_read = {"special_texts", "normalized_special_texts", "_turn"} <= vars(self).keys()
        return is_turn_read and "with_tools" in vars(self.template)

    def read(self) -> None:
        """Derive all facts from texts that the template renders."""
        _ = self._turn, self.special_texts, self.normalized_special_texts, self.template.with_tools

    @cached_property
    def _turn(self) -> "_RenderedTurn":
        return _turn_of(self.template, self.tokenizer, set(self.configured_ends))


@dataclass(frozen=True)
class _RenderedTurn:
    """The text that a template writes around the content of an answer."""

    end: int | None = None
    end_text: str = ""
    lead: str = ""
    pad: str = ""
    fault: str | None = None
    tuning_fault: str | None = None


def _turn_of(template: PromptTemplate, tokenizer: Tokenizer, ends: set[int]) -> _RenderedTurn:
    """Render a question with its answer, and find the token that the template writes after the answer."""
    try:
        before = template.render([ASKED], add_generation_prompt=True, limits=PLAIN)
        whole = template.render([ASKED, ANSWERED], add_generation_prompt=False, limits=PLAIN)
    except TemplateFailed as error:
        return _RenderedTurn(fault=f"a plain question cannot be rendered: {error}")
    content_end = whole.rfind(ANSWER) + len(ANSWER)
    if content_end < len(ANSWER):
        return _RenderedTurn(fault="its chat template leaves out the answer of a conversation")
    untyped: Any = tokenizer
    encoding = encoding_of(tokenizer, whole)
    ids: list[int] = encoding.ids
    added = tokenizer.get_added_tokens_decoder()
    first = token_at(encoding, content_end, len(whole))
    index = next((i for i in range(first, len(ids)) if ids[i] in ends or ids[i] in added), None)
    end = None if index is None else ids[index]
    end_text = whole[content_end:].rstrip() if index is None else str(untyped.id_to_token(end))
    last = len(ids) if index is None else index

    prompt = encode(tokenizer, before)
    if not whole.startswith(before):
        return _RenderedTurn(
            end,
            end_text,
            tuning_fault="the prompt of its chat template does not stand before the answer in a conversation (it "
            "may open the model's reasoning), so that an answer would be asked for in another place than it is learnt",
        )
    answers = (begin + ANSWER for begin in ("", *BEGINNINGS))
    texts = [whole[: content_end - len(ANSWER)] + answer for answer in answers]
    if any(encode(tokenizer, text)[: len(prompt)] != prompt for text in texts):
        return _RenderedTurn(
            end,
            end_text,
            tuning_fault="its tokenizer joins the end of the prompt with the beginning of the answer: take the "
            "space or line break from the end of the chat template's prompt, and write it before the answer",
        )
    text = continuation(tokenizer, prompt, ids[len(prompt) : last])
    lead, found, pad = text.partition(ANSWER)
    if not found:
        return _RenderedTurn(fault="its tokenizer does not give back the text of an answer")
    return _RenderedTurn(end, end_text, lead, pad if index is not None else "")


def token_at(encoding: Any, character: int, characters: int) -> int:
    """The index of the first token at or after a character; the number of tokens if there is none.

    Some tokenizers leave spaces out of the offsets of their tokens.
    """
    for place in range(character, characters):
        token = encoding.char_to_token(place)
        if token is not None:
            return token
    return len(encoding.ids)


def _ends_in(file: Path) -> list[int]:
    """The end tokens named by a configuration; none without a file. Raises TokenizerFault."""
    try:
        settings: object = json.loads(file.read_bytes()) if file.is_file() else {}
    except ValueError:
        raise TokenizerFault(f"its {file.name} cannot be read: it is no JSON") from None
    if not isinstance(settings, dict):
        raise TokenizerFault(f"its {file.name} is not an object")
    named = cast("dict[str, Any]", settings).get("eos_token_id")
    listed: list[Any] = named if isinstance(named, list) else [] if named is None else [named]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
        raise TokenizerFault(
            f"the eos_token_id of its {file.name} must be a token id, or a list of them"
        )
    # Some old configurations say -1 for none.
    return [one for one in listed if 0 <= one <= MAX_TOKEN_ID]
