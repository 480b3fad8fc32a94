"""Loads the base model of a job: weights, tokenizer, template. Refuses one that cannot be used before the first step.

Any causal language model of transformers that reads text alone. No code of a checkpoint is run, and nothing is
downloaded. Next: `learner.py` (trains the model), `tokenized_examples.py` (uses tokenizer and template).
"""

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from tuneship.prompts.template import TemplateFailed
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import TokenizerFault, check_kind, load_tokenizer
from tuneship.training.device import device, number_format
from tuneship.training.examples.tokenized_examples import Encoder
from tuneship.training.examples.tokenizer_check import difference_from, load_as_transformers
from tuneship.training.progress_file import Reason, TrainingFailed

# For a configuration that names no context length; the service's catalogue uses the same.
FALLBACK_CONTEXT_TOKENS = 2048


def load_base(
    base_model: str,
    choose_format: Callable[[int], torch.dtype] = number_format,
    *,
    place: torch.device | None = None,
) -> PreTrainedModel:
    """Load a model from a directory or the local hub cache, onto `place`; None: the device of trainings.

    `choose_format` chooses its number format by its number of parameters. Raises TrainingFailed(internal) saying what
    is wrong with the model.
    """
    try:
        config = AutoConfig.from_pretrained(
            base_model, local_files_only=True, trust_remote_code=False
        )
        if config.get_text_config() is not config:
            raise _unusable(f"models like {config.model_type} read more than text")
        with torch.device("meta"):  # no memory: only the number of parameters is needed
            skeleton: Any = AutoModelForCausalLM.from_config(config)
        count = sum(parameter.numel() for parameter in skeleton.parameters())
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            base_model,
            config=config,
            dtype=choose_format(count),
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise _unusable("its weights are damaged") from error
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, TypeError) as error:
        # Its text would show paths of this machine and pages of names, so only the type is reported.
        raise _unusable(f"transformers says {type(error).__name__}") from error
    model: PreTrainedModel
    model, report = loaded
    _check_weights(model, report)
    return cast("PreTrainedModel", cast("nn.Module", model).to(place or device()))


def load_encoder(base_model: str, base: PreTrainedModel, today: datetime | None = None) -> Encoder:
    """Load the base model's text format and limits. Raises TrainingFailed(internal).

    `today` is the date that a template with a date writes.
    """
    directory = model_directory(base_model)
    config = base.config.get_text_config()
    try:
        tokenizer = load_tokenizer(directory)
        check_kind(tokenizer)
        text_format = ModelTextFormat.of_base(directory, tokenizer)
    except (TokenizerFault, TemplateFailed) as error:
        raise _unusable(str(error)) from error
    except ValueError as error:
        raise _unusable("its configurations cannot be read") from error
    if text_format.tuning_fault is not None:
        raise _unusable(text_format.tuning_fault)
    _check_tokenizer(directory, text_format)
    return Encoder(
        format=text_format if today is None else text_format.dated(today),
        context_length=getattr(config, "max_position_embeddings", None) or FALLBACK_CONTEXT_TOKENS,
        vocabulary=config.vocab_size,
    )


def _check_tokenizer(directory: Path, text_format: ModelTextFormat) -> None:
    """Raise TrainingFailed(internal) where transformers reads texts of the model differently."""
    try:
        difference = difference_from(load_as_transformers(directory), text_format)
    except Exception as error:
        raise _unusable(f"transformers reads no tokenizer in it: {type(error).__name__}") from error
    if difference is not None:
        raise _unusable(
            f"transformers reads {difference} differently from its tokenizer.json: add it, or add it again, with "
            "`tuneship models add`, which keeps the tokenizer as transformers reads it"
        )


def model_directory(base_model: str) -> Path:
    """The directory with the files of the base model, itself or in the local hub cache."""
    if Path(base_model).is_dir():
        return Path(base_model)
    return Path(str(cached_file(base_model, "config.json", local_files_only=True))).parent


def _check_weights(model: PreTrainedModel, report: dict[str, Any]) -> None:
    """Refuse missing tensors and values that are not finite. Raises TrainingFailed(internal)."""
    # transformers fills missing tensors with random numbers, and accepts any value.
    missing = sorted(report["missing_keys"])
    if missing:
        raise _unusable(f"{len(missing)} of its tensors are missing, {missing[0]} first")
    for name, weights in model.named_parameters():
        # One pass without a mask as large as the tensor; NaN shows in both results.
        low, high = torch.aminmax(weights.detach())
        if not (torch.isfinite(low) and torch.isfinite(high)):
            raise _unusable(f"tensor {name} holds values that are not finite")


def _unusable(problem: str) -> TrainingFailed:
    return TrainingFailed(Reason.INTERNAL, f"the base model cannot be used: {problem}")
