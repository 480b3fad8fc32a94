"""`python -m tuneship.conversion ORDER REPORT`: read a model by transformers and by our engine, and compare them.

With a GGUF file, the checkpoint that the engine reads is written first; a tokenizer that transformers reads differently
from its tokenizer.json is written as transformers reads it. The report says why a model is refused; the exit code is 0
then too. Loads torch.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from tuneship.conversion import gguf_model, losses
from tuneship.conversion.base_format import base_format
from tuneship.conversion.failure_reasons import fault_of, versions
from tuneship.conversion.order import ReadingOrder, ReadingReport
from tuneship.serving.models.model import ModelRefused
from tuneship.serving.replica import load_model
from tuneship.serving.weights import AUTO
from tuneship.serving.weights_choice import (
    fastest,
    losses_of_engine,
    measured_weights,
    text_tokens,
)
from tuneship.training.base_model import FALLBACK_CONTEXT_TOKENS, load_base

LIBRARIES = ("transformers", "torch", "safetensors", "tokenizers")


def main(order_file: str, report_file: str) -> int:
    """Read the model that the order names and write the report, also of a failure. Returns the exit code."""
    order = ReadingOrder.read(Path(order_file))
    try:
        report = read_both(order)
    except Exception as error:  # noqa: BLE001 (whatever a foreign file brings about)
        report = ReadingReport(fault=fault_of(error))
    report.write(Path(report_file))
    return 0


def read_both(order: ReadingOrder) -> ReadingReport:
    """Read the model twice, one after the other. Raises whatever a foreign file brings about."""
    target = Path(order.target)
    model = _source_model(order)
    found = base_format(order)
    config: Any = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None) or FALLBACK_CONTEXT_TOKENS
    tokens = text_tokens(found.format.tokenizer, length)
    if len(tokens) < 2 or max(tokens) >= config.vocab_size:
        raise ModelRefused("its tokenizer and its weights do not belong together")
    before = losses.losses_of_source(model, tokens)
    del model  # the memory of one model at a time

    engine = load_model(target, "float32")
    after = losses_of_engine(engine, tokens)
    report = ReadingReport(
        loss_before=float(before.mean()),
        loss_after=float(after.mean()),
        difference=float((after - before).square().mean().sqrt()),
        versions=versions(*LIBRARIES, *([] if order.gguf_file is None else ["gguf"])),
        notes=found.notes(str(config.model_type)),
        tuning_fault=found.format.tuning_fault,
    )
    if not order.asks and order.weights is None:
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
    if not order.asks:
        return report
    answer = losses.answer_of(served, found.format)
    return replace(report, answer=answer)


def _source_model(order: ReadingOrder) -> PreTrainedModel:
    """The model as transformers reads it; a GGUF file is converted on the way."""
    source, target = Path(order.source), Path(order.target)
    if order.gguf_file is None:
        # A GPU is left to those who serve and train.
        cpu = torch.device("cpu")
        return load_base(str(source), choose_format=lambda _: torch.float32, place=cpu)
    model, header = gguf_model.read_gguf(source, order.gguf_file)
    gguf_model.save_tokenizer(source, order.gguf_file, target)
    gguf_model.save_checkpoint(model, header, target)
    return model.eval()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
