"""`python -m tuneship.conversion.exporting ORDER REPORT`: write a tuned model for other programs, and read it back.

What was written is compared with our engine's logits and answers for fixed texts before anybody gets it. The report
says why there is no export; the exit code is 0 then too. Loads torch.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from tuneship.conversion.failure_reasons import fault_of, versions
from tuneship.conversion.logits import (
    distance,
    engine_answer,
    engine_logits,
    engine_with_adapter,
    fixed_texts,
    float32_model,
    peft_model,
    transformers_logits,
)
from tuneship.conversion.order import GGUF_FILE, NICENESS, ExportOrder, ExportReport
from tuneship.conversion.side_files import read_object, write_side_files
from tuneship.host.priority import lower_priority
from tuneship.host.weight_files import ADAPTER_CONFIG
from tuneship.prompts.template import PromptTemplate
from tuneship.serving.models.model import ModelRefused
from tuneship.serving.parity_check import differing_choice

LIBRARIES = ("transformers", "peft", "torch", "safetensors", "tokenizers")
# The differences that rounding explains, in standard deviations of the logits: about three times what was measured on
# the shipped model, SmolLM2-135M and tiny random ones of each kind (docs/models.md).
ALLOWED = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.15, "f16": 0.01, "q8_0": 0.1}


def main(order_file: str, report_file: str) -> int:
    """Carry out one order; returns the exit code."""
    order = ExportOrder.read(Path(order_file))
    try:
        report = export(order)
    except Exception as error:  # noqa: BLE001 (whatever a file brings about)
        report = ExportReport(fault=fault_of(error))
    report.write(Path(report_file))
    return 0


def export(order: ExportOrder) -> ExportReport:
    """Write the files of one format and read them back. Raises whatever a file brings about."""
    base, adapter = Path(order.base), Path(order.adapter)
    engine = engine_with_adapter(base, adapter)
    facts = engine.model.facts
    text, talks = fixed_texts(base, adapter, facts.context_length, facts.vocabulary)
    texts = [text, *(prompt for _, prompt in talks)]
    expected = [engine_logits(engine, tokens) for tokens in texts]
    answers = [engine_answer(engine, *talk) for talk in talks]
    del engine  # the memory of one model at a time
    if order.format == "gguf":
        from tuneship.conversion.gguf_model import read_gguf  # noqa: PLC0415 - needs `gguf`

        number_format = _write_gguf(order)
        model: Any = read_gguf(Path(order.target), GGUF_FILE)[0].eval()
    else:
        is_merged = order.format == "merged"
        number_format = _write_merged(order) if is_merged else _write_peft(order)
        # Before the model is loaded, which reads the end tokens.
        write_side_files(base, PromptTemplate.load(adapter, base=base), Path(order.target), talks)
        target = Path(order.target)
        model = float32_model(target) if is_merged else peft_model(base, target)
    found = [transformers_logits(model, tokens) for tokens in texts]
    for probe in answers:
        logits = transformers_logits(model, [*probe.prompt, *probe.greedy[:-1]])
        answered = logits[len(probe.prompt) - 1 :]
        place = differing_choice(probe, answered, ALLOWED[number_format])
        if place is not None:
            raise ModelRefused(
                f"token {place + 1} of the export's answer to a fixed question is not that of the model"
            )
    return ExportReport(
        difference=distance(found, expected),
        allowed=ALLOWED[number_format],
        number_format=number_format,
        versions=versions(*LIBRARIES, *(["gguf"] if order.format == "gguf" else [])),
    )


def _write_peft(order: ExportOrder) -> str:
    """Write the adapter's files; the base model is named by its public name, not by its folder here."""
    adapter, target = Path(order.adapter), Path(order.target)
    for file in adapter.iterdir():
        shutil.copyfile(file, target / file.name)
    config: dict[str, Any] = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = order.base_name
    (target / ADAPTER_CONFIG).write_text(
        json.dumps(config, indent=2, sort_keys=True), encoding="utf-8"
    )
    return "float32"


def _merged(order: ExportOrder) -> PreTrainedModel:
    """The base model with the adapter added to its weights, in float32."""
    return peft_model(Path(order.base), Path(order.adapter)).merge_and_unload()


def _write_merged(order: ExportOrder) -> str:
    """Write a checkpoint in the number format of the base model's."""
    base, target = Path(order.base), Path(order.target)
    model: Any = _merged(order)
    config = read_object(base / "config.json")
    number_format = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    kept: torch.dtype = getattr(torch, number_format)
    nn.Module.to(model, kept)
    for weights in model.parameters():
        if not torch.isfinite(weights).all():
            raise OverflowError("the merged weights do not fit the base model's number format")
    # That of the base model, which transformers refuses to save where it names options of another kind of answer, is
    # written with the other files; and so is no code that the base model's folder may have.
    model.generation_config = GenerationConfig()
    if hasattr(model.config, "auto_map"):
        del model.config.auto_map
    model.save_pretrained(target)
    return number_format


def _write_gguf(order: ExportOrder) -> str:
    """Write one file with weights, tokenizer and template."""
    from tuneship.conversion.gguf_writer import write_model  # noqa: PLC0415 - needs `gguf`

    about = {"gguf_type": order.gguf_type, "name": order.name, "licence": order.licence}
    template = PromptTemplate.load(Path(order.adapter), base=Path(order.base))
    write_model(_merged(order), Path(order.base), template, Path(order.target) / GGUF_FILE, about)
    return order.gguf_type


if __name__ == "__main__":
    lower_priority(NICENESS)
    sys.exit(main(*sys.argv[1:]))
