"""The product's side of a cell: the rows that it learns of a conversation, and the prompts that it serves."""

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig, GenerationConfig

from tests.support.zoo.conversations import CONVERSATIONS, Conversation
from tuneship.contract.errors import ValidationFailed
from tuneship.conversion.base_format import base_format
from tuneship.conversion.failure_reasons import fault_of
from tuneship.conversion.order import ReadingOrder
from tuneship.service.catalogues.base_models import CataloguedModel, CatalogueFault
from tuneship.service.catalogues.origins import ORIGIN_FILE
from tuneship.service.generation.prompts import raw_tokens, rendered_prompt
from tuneship.training.base_model import load_encoder
from tuneship.training.examples.data_files import read_rows
from tuneship.training.objective import SupervisedFineTuning
from tuneship.training.progress_file import TrainingFailed


class Refused(Exception):
    """The product refuses; the text is what its user reads."""


@dataclass(frozen=True)
class Row:
    """A row as it is learnt."""

    ids: list[int]
    mask: list[bool]


def write_rows(folder: Path) -> Path:
    """Write a dataset file for each conversation, once for all cells."""
    for name, conversation in CONVERSATIONS.items():
        line = json.dumps({"messages": conversation})
        (folder / f"{name}.jsonl").write_text(f"{line}\n")
    return folder


@dataclass(frozen=True)
class Ours:
    """A checkpoint as it is added, and then read by the service and the training."""

    source: Path
    # The folder with a file for each conversation (`write_rows`).
    rows: Path

    @property
    def base(self) -> CataloguedModel:
        """The base model. Raises `Refused` for one that cannot be used."""
        if isinstance(self._added, str):
            raise Refused(self._added)
        return self._added

    @cached_property
    def _added(self) -> CataloguedModel | str:
        """The model that `models add` makes of the checkpoint, without reading weights; or why it makes none."""
        fault = CataloguedModel("zoo", self.source, "zoo", "1", "").fault
        if fault is not None:
            return fault
        target = self.source / "added"
        shutil.copytree(self.source, target)
        try:
            base_format(ReadingOrder(str(self.source), str(target)))
        except Exception as error:  # noqa: BLE001 - as the process that reads it does
            return fault_of(error)
        # As for every added model; it says that transformers was asked.
        (target / ORIGIN_FILE).touch()
        base = CataloguedModel("zoo", target, "zoo", "1", "")
        return base.fault or base

    @cached_property
    def encoder(self) -> Any:
        """The encoder of conversations. Raises `Refused`."""
        folder = self.base.path
        config = AutoConfig.from_pretrained(folder)
        generation = None
        if (folder / "generation_config.json").is_file():
            generation = GenerationConfig.from_pretrained(folder)
        try:
            model: Any = SimpleNamespace(config=config, generation_config=generation)
            return load_encoder(str(folder), model)
        except TrainingFailed as failure:
            raise Refused(failure.message) from None

    def learnt(self, name: str) -> list[Row]:
        """The rows that are learnt of a conversation. Raises `Refused`."""
        file = self.rows / f"{name}.jsonl"
        try:
            read = read_rows(file, "conversation", self.encoder, SupervisedFineTuning()).rows
        except TrainingFailed as failure:
            raise Refused(failure.message) from None
        pieces = [slice(a, b) for a, b in pairwise(read.starts)]
        return [Row(read.tokens[one].tolist(), read.loss_mask[one].tolist()) for one in pieces]

    @property
    def end_texts(self) -> list[str | None]:
        """The texts that a template writes behind an answer where no token ends it."""
        return [self.encoder.format.stop_text, self.encoder.format.pad]

    def prompt(self, messages: Conversation) -> list[int]:
        """The tokens that are served. Raises `Refused`."""
        try:
            return [*rendered_prompt(self.base.text_format, messages, "messages").tokens]
        except (ValidationFailed, CatalogueFault) as refusal:
            raise Refused(str(refusal)) from None

    def raw_prompt(self, text: str) -> list[int]:
        """The tokens of a prompt without a template. Raises `Refused`."""
        try:
            return [*raw_tokens(self.base, text, 512, "prompt")]
        except (ValidationFailed, CatalogueFault) as refusal:
            raise Refused(str(refusal)) from None
