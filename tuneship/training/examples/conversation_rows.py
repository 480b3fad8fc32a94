"""Cuts a conversation's text where the assistant's turns begin and end: into learnt parts and the text before them.

Loads no torch, so that the service checks a dataset with it. Next: `tokenized_examples.py` (tokens and loss mask).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tuneship.contract.lines.dataset_lines import Message
from tuneship.prompts.template import PromptTemplate, TemplateFailed
from tuneship.training.examples.tokenized_examples import Segment


def conversation_rows(
    messages: Sequence[Message],
    template: PromptTemplate,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[list[Segment]]:
    """The rendered conversation as one row, cut where the assistant's turns begin and end.

    A template that renders an earlier turn differently once later ones follow (some drop its reasoning, or put another
    end behind the last turn) gives a row for each learnt turn, with the text before it as generation asks for it. The
    text after the last target turn is left out, since no target follows from it. Raises TemplateFailed where the prompt
    for a turn does not stand before it.
    """
    if any("tool_calls" in message for message in messages):
        template = template.with_tools  # also for the turns before the first call

    def render(turns: Sequence[Message], *, asks: bool) -> str:
        return template.render(turns, add_generation_prompt=asks, tools=tools)

    whole = render(messages, asks=False)
    row: list[Segment] = []
    rows: list[list[Segment]] = []
    position = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight", 1) == 0:
            continue
        try:
            before = render(messages[:number], asks=True)
        except TemplateFailed:
            if number > 0:
                raise
            raise TemplateFailed(
                "the chat template of the base model cannot ask for turn 1, since no turn stands before it"
            ) from None
        until = whole if number == len(messages) - 1 else render(messages[: number + 1], asks=False)
        if not until.startswith(before):
            raise TemplateFailed(
                f"the chat template of the base model renders turn {number + 1} differently alone "
                "and within the conversation, so the learnt text cannot be separated from the prompt"
            )
        target = Segment(until[len(before) :], is_target=True)
        rows.append([Segment(before, is_target=False), target])
        if whole.startswith(until) and position <= len(before):
            row += [Segment(whole[position : len(before)], is_target=False), target]
            position = len(until)
    return [row] if len(row) == 2 * len(rows) else rows
