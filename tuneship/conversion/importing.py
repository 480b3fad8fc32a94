"""`python -m tuneship.conversion.importing ORDER REPORT`: check an adapter that was trained elsewhere.

All of the archive is foreign, so its files are read here and nowhere else. What the service stores is written here: the
tensors, a configuration of plain names and numbers, and logits and greedy tokens as peft computes them, with which the
adapter is compared at each load. Of the chat template only the text is compared. Loads torch.
"""

import sys
from functools import partial
from pathlib import Path

import torch

from tuneship.conversion.failure_reasons import fault_of
from tuneship.conversion.logits import engine_with_adapter, peft_model
from tuneship.conversion.order import NICENESS, ImportOrder, ImportReport
from tuneship.conversion.plain_adapter import write_plain
from tuneship.conversion.received_adapter import AdapterFault, check_template, received
from tuneship.conversion.trained_tokenizer import check_tokenizer
from tuneship.host.priority import lower_priority
from tuneship.prompts import parity
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import encode, load_tokenizer
from tuneship.serving.adapters import AdapterRefused
from tuneship.training.greedy import greedy_logits
from tuneship.training.parity_notes import probe_of


def main(order_file: str, report_file: str) -> int:
    """Carry out one order; returns the exit code."""
    try:
        report = take_in(ImportOrder.read(Path(order_file)))
    except AdapterFault as fault:
        report = ImportReport(fault=str(fault))
    except Exception as error:  # noqa: BLE001 (whatever a foreign file brings about)
        report = ImportReport(fault=f"cannot be served: {fault_of(error)}")
    report.write(Path(report_file))
    return 0


def take_in(order: ImportOrder) -> ImportReport:
    """Check the adapter and write it to the order's target. Raises the fault of the adapter."""
    target = Path(order.target)
    source = target.with_name("received")
    source.mkdir(mode=0o700)
    identifier = received(order, source)
    if identifier is None:
        return ImportReport()
    base = Path(order.bases[identifier])
    check_template(base, source)
    check_tokenizer(base, source)
    write_plain(source, target, identifier)
    engine = engine_with_adapter(base, target)
    context_length = engine.model.facts.context_length
    del engine  # the memory of one model at a time
    save_parity(base, source, target, context_length)
    # Now it has what peft computes, from the adapter's own configuration, to be compared with.
    engine_with_adapter(base, target)
    return ImportReport(identifier)


def save_parity(base: Path, source: Path, target: Path, context_length: int) -> None:
    """Write the parity file of the adapter in `source` into `target`. Raises `AdapterRefused`."""
    tokenizer = load_tokenizer(base)
    template = ModelTextFormat.of_base(base, tokenizer).template
    reference = peft_model(base, source)
    probes: list[parity.Probe] = []
    for messages, prompt in parity.prompts(template, partial(encode, tokenizer), context_length):
        logits = greedy_logits(reference, prompt, parity.greedy_count(prompt, context_length))
        if not torch.isfinite(logits).all():
            raise AdapterRefused("with it the base model computes values that are not finite")
        probes.append(probe_of(messages, prompt, logits))
    parity.Parity("float32", probes).save(target)


if __name__ == "__main__":
    lower_priority(NICENESS)
    sys.exit(main(*sys.argv[1:]))
