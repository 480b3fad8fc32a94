"""The training method: how examples become rows, the loss, and what an evaluation measures.

The loop, the model and the files are the same for every method.
`SupervisedFineTuning` is the only method so far. Knows no files and no model. Loads torch; next: `data_files.py`
(reads examples), `learner.py` (computes losses), `training_loop.py` (picks the best checkpoint).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from tuneship.contract.dataset_lines import DatasetFormat, Message, parse_example
from tuneship.contract.tool_lines import tools_of
from tuneship.template import PromptTemplate, TemplateFailed
from tuneship.training.batches import Indices, PaddedBatch
from tuneship.training.tokenized_examples import Segment, TokenizedExamples

# Sums over the tokens or rows of an evaluation, by name; micro-batches and worker ranks add theirs up.
Totals = dict[str, float]
# The results of one evaluation, by the names of the progress file.
Measures = dict[str, float]

# exp of more is no number that a JSON line could hold.
MAX_EXPONENT = 700.0


class ExampleRows(NamedTuple):
    """The text of each row that the model sees of one example."""

    rows: list[list[Segment]]
    has_tools: bool
    """Whether the example has functions or calls of them."""


class Objective(Protocol):
    """A training method, as the data reader, the learner and the loop use it.

    A method whose examples have several rows, such as the two answers of a preference, also needs batches that keep
    these rows together; `batches.py` shuffles single rows.
    """

    @property
    def deciding_measure(self) -> str:
        """The measure that picks the best checkpoint and stops a training early."""
        ...

    @property
    def lower_is_better(self) -> bool:
        """The direction of the deciding measure."""
        ...

    def rows(
        self, example: Any, dataset_format: DatasetFormat, template: PromptTemplate
    ) -> ExampleRows:
        """The rows of one example, a parsed line of a dataset file.

        Raises ExampleProblem for an example that the format does not allow, and TemplateFailed.
        """
        ...

    def loss_terms(self, rows: TokenizedExamples, indices: Indices) -> int:
        """The number of terms that `loss` sums up over these rows; their mean is the training loss."""
        ...

    def loss(self, logits: Tensor, batch: PaddedBatch) -> Tensor:
        """Summed loss of a micro-batch; keeps the graph for backward. `logits`: (targets, vocabulary)."""
        ...

    def evaluate(self, logits: Tensor, batch: PaddedBatch) -> Totals:
        """The sums of one micro-batch of an evaluation. `logits`: (targets, vocabulary)."""
        ...

    def measures(self, totals: Totals) -> Measures:
        """The results of a whole evaluation, as checkpoints keep them."""
        ...

    def reported(self, measures: Measures) -> Measures:
        """The results as the progress file reports them: `measures` and what follows from them."""
        ...


class SupervisedFineTuning:
    """Learns the assistant's turns of each example, by cross-entropy over their tokens."""

    deciding_measure = "validation_loss"
    lower_is_better = True

    def rows(
        self, example: Any, dataset_format: DatasetFormat, template: PromptTemplate
    ) -> ExampleRows:
        """One row for each example: the rendered conversation."""
        messages = parse_example(example, dataset_format)
        tools = tools_of(example) if dataset_format == "conversation" else []
        has_tools = bool(tools) or any("tool_calls" in message for message in messages)
        return ExampleRows([conversation_segments(messages, template, tools)], has_tools)

    def loss_terms(self, rows: TokenizedExamples, indices: Indices) -> int:
        """The number of target tokens."""
        return rows.count_targets(indices)

    def loss(self, logits: Tensor, batch: PaddedBatch) -> Tensor:
        """Cross-entropy summed over the target tokens."""
        targets = torch.from_numpy(batch.targets).to(logits.device)
        return functional.cross_entropy(logits, targets, reduction="none").sum()

    def evaluate(self, logits: Tensor, batch: PaddedBatch) -> Totals:
        """Summed loss, the number of target tokens, and how many of them the model ranks first."""
        targets = torch.from_numpy(batch.targets).to(logits.device)
        loss = functional.cross_entropy(logits, targets, reduction="sum").item()
        correct = int((logits.argmax(-1) == targets).sum())
        return {"loss": loss, "correct": correct, "tokens": len(targets)}

    def measures(self, totals: Totals) -> Measures:
        """Mean loss in nats and accuracy, both per target token."""
        return {
            "validation_loss": totals["loss"] / totals["tokens"],
            "accuracy": totals["correct"] / totals["tokens"],
        }

    def reported(self, measures: Measures) -> Measures:
        """Loss, accuracy and perplexity."""
        perplexity = math.exp(min(measures["validation_loss"], MAX_EXPONENT))
        return {**measures, "perplexity": perplexity}


def add_totals(total: Mapping[str, float], part: Mapping[str, float]) -> Totals:
    """Both together; a name that `total` lacks counts as 0."""
    return {**total, **{name: total.get(name, 0) + value for name, value in part.items()}}


def conversation_segments(
    messages: Sequence[Message],
    template: PromptTemplate,
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[Segment]:
    """Cut the text of a conversation where the assistant's turns begin and end.

    The text after the last target turn is left out, since no target follows from it. Raises TemplateFailed when the
    template renders earlier turns differently once later ones follow (some drop their reasoning): no cut is right then.
    """
    if any("tool_calls" in message for message in messages):
        template = template.with_tools  # also for the turns before the first call

    def render(turns: Sequence[Message], *, asks: bool) -> str:
        return template.render(turns, add_generation_prompt=asks, tools=tools)

    whole = render(messages, asks=False)
    segments: list[Segment] = []
    position = 0
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or message.get("weight", 1) == 0:
            continue
        before = render(messages[:number], asks=True)
        until = render(messages[: number + 1], asks=False)
        if not (until.startswith(before) and whole.startswith(until) and position <= len(before)):
            raise TemplateFailed(
                f"the chat template of the base model renders turn {number + 1} differently alone "
                "and within the conversation, so the learnt text cannot be separated from the prompt"
            )
        segments.append(Segment(whole[position : len(before)], is_target=False))
        segments.append(Segment(whole[len(before) : len(until)], is_target=True))
        position = len(until)
    return segments
