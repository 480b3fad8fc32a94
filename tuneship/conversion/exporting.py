"""`python -m tuneship.conversion.exporting ORDER REPORT`: write a tuned model for other programs, and read it back.

What was written is compared with our engine's logits for fixed texts before anybody gets it. The report says why there
is no export; the exit code is 0 then too. Loads torch.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import PreTrainedModel

from tuneship.conversion.failure_reasons import refusal_of, versions
from tuneship.conversion.logits import (
    distance,
    engine_logits,
    engine_with_adapter,
    fixed_texts,
    transformers_logits,
)
from tuneship.conversion.order import GGUF_FILE, ExportOrder, ExportReport
from tuneship.serving.adapters import CONFIG
from tuneship.template import PromptTemplate
from tuneship.training.base_model import load_base

# A GPU is left to those who serve and train.
CPU = torch.device("cpu")
LIBRARIES = ("transformers", "peft", "torch", "safetensors", "tokenizers")
# The files beside the weights that a merged model has of its base.
SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# The differences that rounding explains, in standard deviations of the logits: about three times what was measured on
# the shipped model, SmolLM2-135M and tiny random ones of each kind (docs/models.md).
ALLOWED = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.15, "f16": 0.01, "q8_0": 0.1}


def main(order_file: str, report_file: str) -> int:
    """Carry out one order; returns the exit code."""
    order = ExportOrder.read(Path(order_file))
    try:
        report = export(order)
    except Exception as error:  # noqa: BLE001 (whatever a file brings about)
        report = ExportReport(refused=refusal_of(error))
    report.write(Path(report_file))
    return 0


def export(order: ExportOrder) -> ExportReport:
    """Write the files of one format and read them back. Raises whatever a file brings about."""
    base, adapter = Path(order.base), Path(order.adapter)
    engine, lora = engine_with_adapter(base, adapter)
    texts = fixed_texts(base, adapter, engine.facts.context_length, engine.facts.vocabulary)
    expected = [engine_logits(engine, lora, tokens) for tokens in texts]
    del engine, lora  # the memory of one model at a time
    write = {"peft": _write_peft, "merged": _write_merged, "gguf": _write_gguf}[order.format]
    number_format = write(order)
    target = Path(order.target)
    if order.format == "gguf":
        from tuneship.conversion.gguf_model import read_gguf  # noqa: PLC0415 - needs `gguf`

        model = read_gguf(target, GGUF_FILE)[0].eval()
    else:
        model = _with_adapter(base, target) if order.format == "peft" else _float32(target)
    found = [transformers_logits(model, tokens) for tokens in texts]
    return ExportReport(
        difference=distance(found, expected),
        allowed=ALLOWED[number_format],
        number_format=number_format,
        versions=versions(*LIBRARIES, *(["gguf"] if order.format == "gguf" else [])),
    )


def _write_peft(order: ExportOrder) -> str:
    """Write the adapter's files; the base model is named as people know it, not by its folder here."""
    adapter, target = Path(order.adapter), Path(order.target)
    for file in adapter.iterdir():
        shutil.copyfile(file, target / file.name)
    config: dict[str, Any] = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = order.base_name
    (target / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
    return "float32"


def _merged(order: ExportOrder) -> PreTrainedModel:
    """The base model with the adapter added to its weights, in float32."""
    model = _with_adapter(Path(order.base), Path(order.adapter))
    return model.merge_and_unload()


def _with_adapter(base: Path, adapter: Path) -> Any:
    model: Any = _float32(base)
    # peft would read the adapter onto a GPU.
    place = {"torch_device": CPU.type, "local_files_only": True}
    return PeftModel.from_pretrained(model, str(adapter), **place).eval()


def _float32(folder: Path) -> PreTrainedModel:
    return load_base(str(folder), choose_format=lambda _: torch.float32, place=CPU).eval()


def _write_merged(order: ExportOrder) -> str:
    """Write a checkpoint in the number format of the base model's."""
    base, adapter, target = Path(order.base), Path(order.adapter), Path(order.target)
    model: Any = _merged(order)
    config = json.loads((base / "config.json").read_text(encoding="utf-8"))
    number_format = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    kept: torch.dtype = getattr(torch, number_format)
    nn.Module.to(model, kept)
    for weights in model.parameters():
        if not torch.isfinite(weights).all():
            raise OverflowError("the merged weights do not fit the base model's number format")
    model.save_pretrained(target)
    for name in SIDE_FILES:
        if (base / name).is_file():
            shutil.copyfile(base / name, target / name)
    PromptTemplate.load(adapter).save(target)
    return number_format


def _write_gguf(order: ExportOrder) -> str:
    """Write one file with weights, tokenizer and template."""
    from tuneship.conversion.gguf_writer import write_model  # noqa: PLC0415 - needs `gguf`

    about = {"gguf_type": order.gguf_type, "name": order.name, "licence": order.licence}
    template = PromptTemplate.load(Path(order.adapter))
    write_model(_merged(order), Path(order.base), template, Path(order.target) / GGUF_FILE, about)
    return order.gguf_type


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
