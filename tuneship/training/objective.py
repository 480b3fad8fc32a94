"""The training method: how examples become rows, the loss, and what an evaluation measures.

The loop, the model and the files are the same for every method.
`SupervisedFineTuning` is the only method so far. Knows no files and no model. Loads torch; next: `data_files.py`
(reads examples), `learner.py` (computes losses), `training_loop.py` (picks the best checkpoint).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from tuneship.contract.lines.dataset_lines import DatasetFormat, parse_example
from tuneship.contract.lines.tool_lines import tools_of
from tuneship.prompts.template import PromptTemplate
from tuneship.training.examples.batches import Indices, PaddedBatch
from tuneship.training.examples.conversation_rows import conversation_rows
from tuneship.training.examples.tokenized_examples import Segment, TokenizedExamples

# Sums over the tokens or rows of an evaluation, by name; micro-batches and worker ranks add theirs up.
Totals = dict[str, float]
# The results of one evaluation, by the names of the progress file.
Measures = dict[str, float]

# exp of more is no number that a JSON line could hold.
MAX_EXPONENT = 700.0


class ExampleRows(NamedTuple):
    """The text of each row that the model sees of one example."""

    rows: list[list[Segment]]
    # Whether the example has functions or calls of them.
    has_tools: bool


class Objective(Protocol):
    """A training method, as used by the data reader, the learner and the loop.

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

    def row_losses(self, logits: Tensor, batch: PaddedBatch) -> list[float]:
        """The loss of each row of a micro-batch. `logits`: (targets, vocabulary)."""
        ...

    def measures(self, totals: Totals) -> Measures:
        """The results of a whole evaluation, as stored in checkpoints."""
        ...

    def reported(self, measures: Measures) -> Measures:
        """The results for the progress file: `measures` and values derived from them."""
        ...


@dataclass(frozen=True)
class AnswerEnds:
    """The end tokens of an answer, for counting how many ends are learnt."""

    # The tokens at which generation stops; none where a text ends an answer.
    tokens: tuple[int, ...]
    # Rows of this many tokens were cut, and have no end.
    context_length: int


class SupervisedFineTuning:
    """Learns the assistant's turns of each example, by cross-entropy over their tokens."""

    deciding_measure = "validation_loss"
    lower_is_better = True

    def __init__(self, ends: AnswerEnds | None = None) -> None:
        """`ends`: those of the base model's text format; None: ends are not counted."""
        self._ends = ends

    def rows(
        self, example: Any, dataset_format: DatasetFormat, template: PromptTemplate
    ) -> ExampleRows:
        """One row for each example: the rendered conversation."""
        messages = parse_example(example, dataset_format)
        tools = tools_of(example) if dataset_format == "conversation" else []
        has_tools = bool(tools) or any("tool_calls" in message for message in messages)
        return ExampleRows(conversation_rows(messages, template, tools), has_tools)

    def loss_terms(self, rows: TokenizedExamples, indices: Indices) -> int:
        """The number of target tokens."""
        return rows.count_targets(indices)

    def loss(self, logits: Tensor, batch: PaddedBatch) -> Tensor:
        """Cross-entropy summed over the target tokens."""
        targets = torch.from_numpy(batch.targets).to(logits.device)
        return functional.cross_entropy(logits, targets, reduction="none").sum()

    def evaluate(self, logits: Tensor, batch: PaddedBatch) -> Totals:
        """Summed loss, the number of target tokens, and how many of them the model ranks first; the ends likewise."""
        targets = torch.from_numpy(batch.targets).to(logits.device)
        loss = functional.cross_entropy(logits, targets, reduction="sum").item()
        guesses = logits.argmax(-1)
        correct = int((guesses == targets).sum())
        totals: Totals = {"loss": loss, "correct": correct, "tokens": len(targets)}
        return totals if self._ends is None else totals | _count_ends(self._ends, batch, guesses)

    def row_losses(self, logits: Tensor, batch: PaddedBatch) -> list[float]:
        """Mean cross-entropy over the target tokens of each row."""
        targets = torch.from_numpy(batch.targets).to(logits.device)
        losses = functional.cross_entropy(logits, targets, reduction="none").double().cpu().numpy()
        row_of_target = batch.logit_positions // batch.tokens.shape[1]
        sums = np.bincount(row_of_target, weights=losses, minlength=len(batch.tokens))
        return (sums / np.bincount(row_of_target, minlength=len(batch.tokens))).tolist()

    def measures(self, totals: Totals) -> Measures:
        """Mean loss in nats and accuracy, both per target token; and the share of learnt ends, if a row has one."""
        count = totals.get("ends", 0)
        ends = {"ends_learnt": totals["learnt_ends"] / count} if count else {}
        return {
            "validation_loss": totals["loss"] / totals["tokens"],
            "accuracy": totals["correct"] / totals["tokens"],
            **ends,
        }

    def reported(self, measures: Measures) -> Measures:
        """Loss, accuracy and perplexity."""
        perplexity = math.exp(min(measures["validation_loss"], MAX_EXPONENT))
        return {**measures, "perplexity": perplexity}


def _count_ends(ends: AnswerEnds, batch: PaddedBatch, guesses: Tensor) -> Totals:
    """How many rows of a batch have an end, and in how many of them it is the likeliest token after the true answer."""
    row_of_target = batch.logit_positions // batch.tokens.shape[1]
    last = np.flatnonzero(np.diff(row_of_target, append=-1))
    last = last[batch.row_lengths[row_of_target[last]] < ends.context_length]
    expected, guessed = batch.targets[last], guesses.cpu().numpy()[last]
    learnt = expected == guessed
    if ends.tokens:
        # A row whose last target ends no answer, whatever the reason, has no end that could be learnt.
        learnt = np.isin(expected, ends.tokens) & np.isin(guessed, ends.tokens)
    return {"ends": len(last), "learnt_ends": int(learnt.sum())}


def add_totals(total: Mapping[str, float], part: Mapping[str, float]) -> Totals:
    """Both together; a name that `total` lacks counts as 0."""
    return {**total, **{name: total.get(name, 0) + value for name, value in part.items()}}
