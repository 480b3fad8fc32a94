"""How a job's hyperparameters become numbers: defaults, and what "auto" means for this data and this model.

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
from tuneship.service.common.refusals import refused

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
# Without a validation set one example in so many is set aside (`training/rows.py`).
VALIDATION_SHARE = 10


def resolved(
    asked: Hyperparameters, *, examples: int, has_validation_set: bool, parameters: int
) -> dict[str, Any]:
    """The record's hyperparameters. Raises `ValidationRefused` for a warm-up longer than the job.

    `examples`: lines of the training dataset; `parameters`: numbers in the base model.
    """
    learnt = examples if has_validation_set else examples - max(1, examples // VALIDATION_SHARE)
    chosen: dict[str, Any] = asked.model_dump()
    if chosen["early_stopping_patience"] is None:
        del chosen["early_stopping_patience"]  # a record names what is in force
    if chosen["batch_size"] == "auto":
        chosen["batch_size"] = _batch_size(learnt)
    if chosen["epochs"] == "auto":
        chosen["epochs"] = _epochs(learnt)
    if chosen["learning_rate"] == "auto":
        chosen["learning_rate"] = _learning_rate(parameters)
    if chosen["lora_alpha"] is None:
        chosen["lora_alpha"] = usual_alpha(chosen["lora_rank"])
    steps = math.ceil(learnt / chosen["batch_size"]) * chosen["epochs"]
    if chosen["warmup_steps"] == "auto":
        chosen["warmup_steps"] = min(MOST_WARMUP, round(WARMUP_SHARE * steps))
    if chosen["warmup_steps"] > steps:
        raise refused(
            "hyperparameters.warmup_steps",
            f"must be at most the job's {steps} steps",
            code="out_of_range",
        )
    return chosen


def usual_alpha(rank: int) -> int:
    """What `lora_alpha` is when it is left out: adapters of every rank then act equally strongly."""
    return 2 * rank


def _batch_size(examples: int) -> int:
    wanted = max(1, examples // STEPS_OF_AN_EPOCH)
    return min(LARGEST_BATCH, max(SMALLEST_BATCH, 1 << (wanted.bit_length() - 1)))


def _epochs(examples: int) -> int:
    if examples * USUAL_EPOCHS < FEWEST_SEEN:
        return min(MOST_EPOCHS, FEWEST_SEEN // examples)
    return max(1, min(USUAL_EPOCHS, MOST_SEEN // examples))


def _learning_rate(parameters: int) -> float:
    rate = KNOWN_RATE * (KNOWN_PARAMETERS / max(1, parameters)) ** RATE_EXPONENT
    return float(f"{min(HIGHEST_RATE, max(LOWEST_RATE, rate)):.1e}")
