"""`python -m tuneship.conversion ORDER REPORT`: read a model by transformers and by our engine, and compare them.

With a GGUF file, the checkpoint that the engine reads is written first. The report says why a model is refused; the
exit code is 0 then too. Loads torch.
"""

import errno
import os
import re
import sys
import traceback
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from tuneship.conversion import gguf_model, losses
from tuneship.conversion.gguf_header import GgufRefused
from tuneship.conversion.order import ReadingOrder, ReadingReport
from tuneship.serving.model import ModelRefused
from tuneship.serving.replica import load_model
from tuneship.serving.weights import AUTO
from tuneship.serving.weights_choice import (
    fastest,
    losses_of_engine,
    measured_weights,
    text_tokens,
)
from tuneship.template import TemplateFailed
from tuneship.training.base_model import FALLBACK_CONTEXT_TOKENS, load_base
from tuneship.training.progress_file import TrainingFailed

LIBRARIES = ("transformers", "torch", "safetensors", "tokenizers", "gguf")
# The library that reads and writes tensors has the number of an error in its text alone.
OS_ERROR = re.compile(r"\(os error (\d+)\)")


def main(order_file: str, report_file: str) -> int:
    """Carry out one order; returns the exit code."""
    order = ReadingOrder.read(Path(order_file))
    try:
        report = read_both(order)
    except (GgufRefused, ModelRefused, TemplateFailed) as refusal:
        report = ReadingReport(refused=str(refusal))
    except TrainingFailed as failure:
        report = ReadingReport(refused=failure.message)
    except MemoryError:
        report = ReadingReport(refused="the machine's memory was not enough")
    except Exception as error:  # noqa: BLE001 (whatever a foreign file brings about)
        report = ReadingReport(refused=_refusal_of(error))
    report.write(Path(report_file))
    return 0


def read_both(order: ReadingOrder) -> ReadingReport:
    """Read the model twice, one after the other. Raises whatever a foreign file brings about."""
    target = Path(order.target)
    model = _source_model(order)
    tokenizer: Any = Tokenizer.from_file(str(target / "tokenizer.json"))
    config: Any = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or FALLBACK_CONTEXT_TOKENS
    tokens = text_tokens(tokenizer, length)
    if len(tokens) < 2 or max(tokens) >= config.vocab_size:
        raise ModelRefused("its tokenizer and its weights do not belong together")
    losses.question_prompt(target)  # refuses a template that cannot render it
    before = losses.losses_of_source(model, tokens)
    del model  # the memory of one model at a time

    engine = load_model(target, "float32")
    after = losses_of_engine(engine, tokens)
    report = ReadingReport(
        loss_before=float(before.mean()),
        loss_after=float(after.mean()),
        difference=float((after - before).square().mean().sqrt()),
        versions=_versions(with_gguf=order.gguf_file is not None),
    )
    if order.end_tokens is None and order.weights is None:
        return report
    del engine
    weights = order.weights
    if weights == AUTO:
        weights = fastest(measured_weights(target)).weights
    served = load_model(target, weights)
    report = replace(
        report,
        served_format=served.facts.weights,
        served_loss=float(losses_of_engine(served, tokens).mean()),
    )
    if order.end_tokens is None:
        return report
    answer = losses.answer_of(served, target, tokenizer, order.end_tokens)
    return replace(report, answer=answer)


def _source_model(order: ReadingOrder) -> PreTrainedModel:
    """The model as transformers reads it; a GGUF file is converted on the way."""
    source, target = Path(order.source), Path(order.target)
    if order.gguf_file is None:
        return load_base(str(source), choose_format=lambda _: torch.float32)
    model, header = gguf_model.read_gguf(source, order.gguf_file)
    gguf_model.save_tokenizer(source, order.gguf_file, target)
    gguf_model.save_checkpoint(model, header, target)
    return model.eval()


def _refusal_of(error: Exception) -> str:
    """Say what failed without the error's own text, which may hold pages of names."""
    named = OS_ERROR.search(str(error))
    number = int(named[1]) if named else getattr(error, "errno", None)
    if number == errno.ENOSPC:
        return "the disk is full"
    if number:
        return f"a file of it cannot be read or written: {os.strerror(number)}"
    if isinstance(error, SafetensorError):
        return "its weights are damaged"
    traceback.print_exc()
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(last.filename).name} line {last.lineno}"
    return f"it cannot be read: {type(error).__name__} in {place}"


def _versions(*, with_gguf: bool) -> dict[str, str]:
    names = LIBRARIES if with_gguf else LIBRARIES[:-1]
    return {name: version(name) for name in names}


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
