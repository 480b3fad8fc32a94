"""`python -m tuneship.conversion.importing ORDER REPORT`: check an adapter that was trained elsewhere.

It is loaded as it will be served. Logits and greedy tokens that came with it are compared; without them those of peft
are, and they are saved, so that it is checked like our own from now on. Loads torch.
"""

import sys
from functools import partial
from pathlib import Path

import torch

from tuneship import parity
from tuneship.conversion.failure_reasons import refusal_of
from tuneship.conversion.logits import engine_with_adapter, peft_model
from tuneship.conversion.order import ImportOrder, ImportReport
from tuneship.conversion.trained_tokenizer import check_tokenizer
from tuneship.serving.adapters import AdapterRefused
from tuneship.template import PromptTemplate
from tuneship.text_tokenizer import encode, load_tokenizer
from tuneship.training.greedy import greedy_logits
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
    """Load the adapter, and compare it with peft where it has no parity file. Raises what is wrong with it."""
    base, adapter = Path(order.base), Path(order.adapter)
    if order.tokenizer is not None:
        check_tokenizer(base, adapter, Path(order.tokenizer))
    engine = engine_with_adapter(base, adapter)
    context_length = engine.model.facts.context_length
    del engine  # the memory of one model at a time
    template = PromptTemplate.load(adapter, base=base)
    encoded = partial(encode, load_tokenizer(base))
    known = parity.Parity.load(adapter)
    if known is not None:
        if not parity.reads_alike(known, template, encoded):
            raise AdapterRefused("its chat template or tokenizer is not that of its training")
        return
    reference = peft_model(base, adapter)
    probes: list[parity.Probe] = []
    for messages, prompt in parity.prompts(template, encoded, context_length):
        logits = greedy_logits(reference, prompt, parity.greedy_count(prompt, context_length))
        if not torch.isfinite(logits).all():
            raise AdapterRefused("with it the base model computes values that are not finite")
        probes.append(probe_of(messages, prompt, logits))
    del reference
    parity.Parity("float32", probes).save(adapter)
    # Now it has what peft computes to be compared with.
    engine_with_adapter(base, adapter)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
