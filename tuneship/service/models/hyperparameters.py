"""Resolves a job's hyperparameters to numbers: defaults, and the meaning of "auto" for this data and this model.

Pure, so the same request on the same data always gives the same record. The rules, in this order:

    batch_size     the largest power of two that still makes 32 steps of an epoch, from 4 to 32
    epochs         3; more on little data, so that 100 examples are seen (25 epochs at most); fewer on much, so that
                   not more than 25,000 are (1 at least). The rule that OpenAI's cookbook gives for its fine-tuning.
    warmup_steps   3 % of the job's steps, 100 at most (QLoRA, Dettmers et al. 2023, and most recipes since)
    learning_rate  2e-4 for 7 billion parameters, halved for every 4.7 times as many (33 billion: 1e-4, the two rates
                   of QLoRA), from 5e-5 to 1e-3, with two significant digits. LoRA wants about the same rate at any
                   rank, so the rank has no part in it. 1e-3 was the best of five rates for the shipped model of a
                   million parameters on 40 rows and on 400; 2e-3 and 5e-4 were worse.
"""

import math
from typing import Any

from tuneship.contract.jobs import Hyperparameters
from tuneship.service.answers.field_errors import field_error

STEPS_OF_AN_EPOCH = 32
SMALLEST_BATCH, LARGEST_BATCH = 4, 32
USUAL_EPOCHS = 3
FEWEST_SEEN, MOST_SEEN = 100, 25_000
MOST_EPOCHS = 25
WARMUP_SHARE = 0.03
MOST_WARMUP = 100
KNOWN_RATE, KNOWN_PARAMETERS = 2e-4, 7e9
RATE_EXPONENT = math.log(2) / math.log(33 / 7)
LOWEST_RATE, HIGHEST_RATE = 5e-5, 1e-3
# Without a validation set, a training sets aside one example in ten (`training/tokenized_examples.py`).
EXAMPLES_PER_VALIDATION_EXAMPLE = 10


def resolved(
    requested: Hyperparameters, *, examples: int, has_validation_set: bool, parameters: int
) -> dict[str, Any]:
    """Return the hyperparameters for the job's record, as numbers.

    `examples`: lines of the training dataset; `parameters`: number of weights of the base model. Raises
    `ValidationFailed` for a warm-up longer than the job.
    """
    learned = (
        examples
        if has_validation_set
        else examples - max(1, examples // EXAMPLES_PER_VALIDATION_EXAMPLE)
    )
    chosen: dict[str, Any] = requested.model_dump()
    if chosen["early_stopping_patience"] is None:
        del chosen["early_stopping_patience"]  # a record has only settings that are in force
    if chosen["batch_size"] == "auto":
        wanted = max(1, learned // STEPS_OF_AN_EPOCH)
        power_of_two = 1 << (wanted.bit_length() - 1)
        chosen["batch_size"] = min(LARGEST_BATCH, max(SMALLEST_BATCH, power_of_two))
    if chosen["epochs"] == "auto":
        if learned * USUAL_EPOCHS < FEWEST_SEEN:
            chosen["epochs"] = min(MOST_EPOCHS, FEWEST_SEEN // learned)
        else:
            chosen["epochs"] = max(1, min(USUAL_EPOCHS, MOST_SEEN // learned))
    if chosen["learning_rate"] == "auto":
        chosen["learning_rate"] = usual_rate(parameters)
    if chosen["lora_alpha"] is None:
        chosen["lora_alpha"] = usual_alpha(chosen["lora_rank"])
    steps = math.ceil(learned / chosen["batch_size"]) * chosen["epochs"]
    if chosen["warmup_steps"] == "auto":
        chosen["warmup_steps"] = min(MOST_WARMUP, round(WARMUP_SHARE * steps))
    if chosen["warmup_steps"] > steps:
        raise field_error(
            "hyperparameters.warmup_steps",
            f"must be at most the job's {steps} steps",
            code="out_of_range",
        )
    return chosen


def usual_rate(parameters: int) -> float:
    """The learning rate for `auto`, by the number of weights of the base model."""
    rate = KNOWN_RATE * (KNOWN_PARAMETERS / max(1, parameters)) ** RATE_EXPONENT
    return float(f"{min(HIGHEST_RATE, max(LOWEST_RATE, rate)):.1e}")


def usual_alpha(rank: int) -> int:
    """The default of `lora_alpha`, which gives adapters of every rank the same strength."""
    return 2 * rank
