"""Plays the processes that export and import tuned models: their files are made at once, and no library is loaded."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from tests.support.objects.files import tar_of
from tuneship.conversion.order import (
    ExportOrder,
    ExportReport,
    ImportOrder,
    ImportReport,
    ProcessMessage,
    ReadingOrder,
)
from tuneship.conversion.received_adapter import AdapterFault, check_template, received
from tuneship.conversion.running import (
    POLL_S,
    ConversionFailed,
    ConversionLimits,
    convert_in_process,
)

R = TypeVar("R", bound=ProcessMessage)
ADAPTER = {
    "adapter_config.json": json.dumps({"base_model_name_or_path": "tuneship-tiny"}).encode(),
    "adapter_model.safetensors": b"weights",
}
ARCHIVE = tar_of(ADAPTER)


class PlayedConversion:
    """Answers orders; a test may choose the report, or have it wait until it is stopped."""

    def __init__(self) -> None:
        self.orders: list[ProcessMessage] = []
        # The folders that the process of the last order may read.
        self.readable: list[Path] = []
        self.report: ProcessMessage | None = None
        self.waits = False
        # The time that real processes have to carry out an order; None: it is played.
        self.seconds: float | None = None

    def __call__(
        self,
        order: ProcessMessage,
        report: type[R],
        work: Path,
        readable: Sequence[Path],
        limits: ConversionLimits,
    ) -> R:
        self.orders.append(order)
        self.readable = list(readable)
        while self.waits:
            if limits.is_stopped():
                raise ConversionFailed("it was stopped")
            time.sleep(POLL_S)
        if self.seconds is not None:
            own = replace(limits, seconds=self.seconds)
            return convert_in_process(order, report, work, readable, own)
        made = self.report or self._made(order)
        assert isinstance(made, report)
        return made

    @staticmethod
    def _made(order: ProcessMessage) -> ProcessMessage:
        if isinstance(order, ExportOrder):
            Path(order.target, "weights").write_bytes(b"exported")
            return ExportReport(difference=0.0, allowed=0.001, number_format="float32")
        assert not isinstance(order, ReadingOrder)
        assert isinstance(order, ImportOrder)
        target = Path(order.target)
        source = target.with_name("received")
        source.mkdir()
        try:
            base = received(order, source)
            if base is not None:
                check_template(Path(order.bases[base]), source)
        except AdapterFault as fault:
            return ImportReport(fault=str(fault))
        for name in ADAPTER:
            (target / name).write_bytes((source / name).read_bytes())
        (target / "parity.json").write_text(json.dumps({"dtype": "float32", "probes": []}))
        return ImportReport(base)
