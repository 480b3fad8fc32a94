"""The text format of a base model that is added or checked, compared with how transformers reads the model's texts."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneship.conversion.order import ReadingOrder
from tuneship.prompts.template import (
    NAMED_TEMPLATES_FOLDER,
    TEMPLATE_FILE,
    TEMPLATE_FILES,
    TOKENIZER_CONFIG_FILE,
    PromptTemplate,
)
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import TOKENIZER_FILE, check_kind, load_tokenizer
from tuneship.serving.models.model import ModelRefused
from tuneship.training.examples.tokenizer_check import (
    difference_from,
    load_as_transformers,
    other_special_tokens,
)

# The kinds of models in the table of docs/models.md; others are served and tuned with a warning.
PROVEN_KINDS = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "gemma2", "phi3", "gpt_neox", "gpt2"}
)


@dataclass(frozen=True)
class BaseFormat:
    """The text format of a base model, and the corrected difference of its tokenizer, if there was one."""

    format: ModelTextFormat
    # In what tokenizer.json differed from what transformers reads, and was written again.
    difference: str | None

    def notes(self, model_type: str) -> list[str]:
        """Facts for people, a sentence each."""
        notes: list[str] = []
        if self.difference is not None:
            notes.append(
                f"transformers reads {self.difference} differently from {TOKENIZER_FILE}: "
                "the tokenizer is kept as transformers reads it"
            )
        appended, stop = self.format.appended_end, self.format.stop_text
        if appended is not None:
            notes.append(
                f"its chat template writes nothing behind an answer: {appended} is put there, in training and serving"
            )
        elif stop is not None:
            notes.append(
                "its chat template ends an answer with a text that is no token: that text stops an answer"
            )
        if self.format.tuning_fault is not None:
            notes.append(f"it can be served, and not tuned: {self.format.tuning_fault}")
        if model_type not in PROVEN_KINDS:
            notes.append(
                f"models of the kind {model_type} are not in the table of what is proven (docs/models.md): "
                "compare some answers with those of transformers"
            )
        return notes


def base_format(order: ReadingOrder) -> BaseFormat:
    """The format of the order's model. Raises `ModelRefused`, `TemplateFailed` and `TokenizerFault`.

    While a model is added, files that transformers reads differently are written as it reads them.
    """
    source, target = Path(order.source), Path(order.target)
    is_added = source != target
    if is_added and (source / NAMED_TEMPLATES_FOLDER).is_dir():
        _write_unshared(target / TEMPLATE_FILE, PromptTemplate.load(source).source)
    found = _format_of(target)
    if found.fault is not None:
        raise ModelRefused(found.fault)
    difference = None
    # A tokenizer that was made of a GGUF file is transformers' own.
    if order.gguf_file is None:
        reference = load_as_transformers(source)
        difference = difference_from(reference, found)
        # They matter to a template, or to the end of an answer, before they matter to a text.
        if difference is None and is_added and other_special_tokens(reference, found):
            difference = "the special tokens"
        if difference is not None:
            if not is_added:
                raise ModelRefused(
                    f"transformers reads {difference} differently from its tokenizer.json"
                )
            _save_as_transformers(reference, target)
            found = _format_of(target)
            left = difference_from(load_as_transformers(target), found)
            left = left or difference_from(reference, found)
            if left is not None:
                kind = type(found.tokenizer.model).__name__
                raise ModelRefused(
                    f"its tokenizer ({type(reference).__name__}, {kind}) is of a kind that is not understood: "
                    f"transformers reads {left} differently"
                )
    return BaseFormat(found, difference)


def _format_of(directory: Path) -> ModelTextFormat:
    tokenizer = load_tokenizer(directory)
    check_kind(tokenizer)
    return ModelTextFormat.of_base(directory, tokenizer)


def _save_as_transformers(reference: Any, target: Path) -> None:
    """Write the tokenizer's files as transformers would save them; a template in a file of its own stays."""
    file, settings = target / TEMPLATE_FILE, target / TOKENIZER_CONFIG_FILE
    source = file.read_text(encoding="utf-8") if file.is_file() else None
    # They may be shared with the source.
    for name in (TOKENIZER_FILE, *TEMPLATE_FILES):
        (target / name).unlink(missing_ok=True)
    reference.save_pretrained(target)
    shutil.rmtree(target / NAMED_TEMPLATES_FOLDER, ignore_errors=True)
    if source is not None:
        _write_unshared(file, source)
    # Another class would be built from the vocabulary again, without what its settings in the source have changed.
    saved: dict[str, Any] = json.loads(settings.read_text(encoding="utf-8"))
    saved["tokenizer_class"] = "PreTrainedTokenizerFast"
    _write_unshared(settings, json.dumps(saved, indent=2, ensure_ascii=False))


def _write_unshared(file: Path, text: str) -> None:
    """Write a file as a new one, because the old one may be shared with the source."""
    file.unlink(missing_ok=True)
    file.write_text(text, encoding="utf-8")
