"""`python -m tuneship.conversion.importing ORDER REPORT`: check an adapter that was trained elsewhere.

It is loaded as it will be served. Logits that came with it are compared; without them they are computed and saved, so
that it is checked like our own from now on. Loads torch.
"""

import sys
from pathlib import Path

import torch

from tuneship import parity
from tuneship.conversion.failure_reasons import refusal_of
from tuneship.conversion.logits import encoder_of, engine_logits, engine_with_adapter, tokenizer_of
from tuneship.conversion.order import ImportOrder, ImportReport
from tuneship.serving.adapters import AdapterRefused
from tuneship.template import PromptTemplate
from tuneship.training.parity_notes import probe_of


def main(order_file: str, report_file: str) -> int:
    """Carry out one order; returns the exit code."""
    try:
        check(ImportOrder.read(Path(order_file)))
        report = ImportReport()
    except Exception as error:  # noqa: BLE001 (whatever a foreign file brings about)
        report = ImportReport(refused=refusal_of(error))
    report.write(Path(report_file))
    return 0


def check(order: ImportOrder) -> None:
    """Load the adapter, and write the logits of fixed prompts where it has none. Raises what is wrong with it."""
    base, adapter = Path(order.base), Path(order.adapter)
    model, lora = engine_with_adapter(base, adapter)
    template, encode = PromptTemplate.load(adapter), encoder_of(tokenizer_of(base))
    known = parity.Parity.load(adapter)
    if known is not None:
        if not parity.reads_alike(known, template, encode):
            raise AdapterRefused("its chat template or tokenizer is not that of its training")
        return
    probes: list[parity.Probe] = []
    for messages, prompt in parity.prompts(template, encode, model.facts.context_length):
        logits = engine_logits(model, lora, prompt)[-1]
        if not torch.isfinite(logits).all():
            raise AdapterRefused("with it the base model computes values that are not finite")
        probes.append(probe_of(messages, prompt, logits))
    parity.Parity("float32", probes).save(adapter)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
