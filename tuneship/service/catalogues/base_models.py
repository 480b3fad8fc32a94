"""The base models: the shipped one and those of a catalogue file. Reads checkpoints' metadata without loading torch.

A catalogue is YAML: `models: [{id, path, name?, version?, description?, runtime?, runtime_options?}]`, where `path` is
a checkpoint directory or a hub id that is already in the local cache, and `runtime` says whose engine serves it. Code
from a checkpoint is never run.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml
from tokenizers import Tokenizer, pre_tokenizers

from tuneship.runtime.engine_kinds import ENGINES, OWN_ENGINE, EngineKind
from tuneship.startup import StartupError
from tuneship.template import PromptTemplate, TemplateFailed

# Architectures with an attention of their own, which our engine finds out when it loads them:
# they would train and then not be served. Of one that is not named here the deployment says so.
NOT_SERVED = frozenset({"bloom", "codegen", "falcon", "gpt_neo", "gpt_oss", "gptj", "mpt"})
# Tokens, for a configuration that names no length.
FALLBACK_CONTEXT = 2048
# Bytes; the limit of the format's own library.
LONGEST_HEAD = 100_000_000
# How many characters one may be made of by what a tokenizer does to a text first.
COMPOSED = {None: 1, "NFC": 4}
# How families name the part of a tensor's name that counts layers: Llama and most others, Falcon,
# MPT.
LAYER = re.compile(r"(^|\.)(layers|h|blocks)\.\d+\.")
SHIPPED = Path(__file__).parents[2] / "base_models"


class CatalogueFault(StartupError):
    """The catalogue file or a checkpoint that it names cannot be used."""


@dataclass(frozen=True)
class CataloguedModel:
    """One checkpoint on this machine."""

    id: str
    path: Path
    name: str
    version: str
    description: str
    runtime: str = OWN_ENGINE.name
    """Whose engine serves it: our own, or `vllm`."""
    runtime_options: tuple[str, ...] = ()
    """More options of the command that starts vLLM for it."""

    @cached_property
    def fault(self) -> str | None:
        """Why nobody can use it, as far as that shows without loading it; None when nothing is wrong."""
        try:
            _ = self.tensors, self.context_length, self.template
            self._check_engine()
        except CatalogueFault as fault:
            return str(fault)
        return None if (self.path / "tokenizer.json").is_file() else "it has no tokenizer.json"

    @property
    def engine(self) -> EngineKind:
        """The engine that `runtime` names."""
        return ENGINES[self.runtime]

    def _check_engine(self) -> None:
        kind = _object(self.path / "config.json").get("model_type")
        if self.engine.is_own and kind in NOT_SERVED:
            raise CatalogueFault(
                f"{kind} models cannot be served by this service's own engine, so none is tuned either"
            )

    @cached_property
    def tensors(self) -> dict[str, list[int]]:
        """Name and shape of every weight, from the heads of the safetensors files. Raises `CatalogueFault`."""
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise CatalogueFault("it has no safetensors file")
        return {name: shape for file in files for name, shape in _shapes(file).items()}

    @cached_property
    def parameters(self) -> int:
        """How many numbers the checkpoint holds."""
        total = 0
        for shape in self.tensors.values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total

    @cached_property
    def context_length(self) -> int:
        """Tokens of prompt and completion together. Raises `CatalogueFault`."""
        config = _object(self.path / "config.json")
        told = config.get("max_position_embeddings") or config.get("n_positions")
        if told is not None and not isinstance(told, int):
            raise CatalogueFault("config.json names a context length that is no number")
        return told or FALLBACK_CONTEXT

    @cached_property
    def linear_modules(self) -> frozenset[str]:
        """Module names that LoRA can target, e.g. `q_proj`."""
        return frozenset(
            name.split(".")[-2]
            for name, shape in self.tensors.items()
            if name.endswith(".weight") and len(shape) == 2 and LAYER.search(name)
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The fast tokenizer, without transformers. Raises `CatalogueFault`."""
        try:
            # Not `from_file`: it reads with the interpreter's lock held, and a file that hangs stops every thread.
            return cast("Any", Tokenizer).from_buffer((self.path / "tokenizer.json").read_bytes())
        except (
            Exception
        ) as error:  # tokenizers raises bare exceptions, whatever is wrong with its file
            raise CatalogueFault("its tokenizer.json cannot be read") from error

    @cached_property
    def longest_token(self) -> int | None:
        """Characters of text that one token stands for at most; None where the tokenizer may take text away.

        It is known of tokenizers that cut bytes: those of GPT-2, Llama 3, Qwen and ours.
        """
        rules: Any = json.loads(cast("Any", self.tokenizer).to_str())
        cuts: Any = rules["pre_tokenizer"] or {"type": None}
        steps: list[Any] = cuts.get("pretokenizers") or [cuts]
        kinds = {one["type"] for one in steps}
        vocabulary: dict[str, int] = rules["model"].get("vocab", {})
        alphabet: list[str] = cast("Any", pre_tokenizers.ByteLevel).alphabet()
        normalizer: str | None = (rules["normalizer"] or {"type": None})["type"]
        takes_away = (
            normalizer not in COMPOSED
            or rules["model"]["type"] != "BPE"
            or not {"ByteLevel"} <= kinds <= {"ByteLevel", "Digits", "Split"}
            or any(one.get("behavior") == "Removed" for one in steps)
            or any(one["lstrip"] or one["rstrip"] for one in rules["added_tokens"])
            or not vocabulary.keys() >= set(alphabet)
        )
        if takes_away:
            return None
        return COMPOSED[normalizer] * max(map(len, vocabulary))

    def is_surely_longer(self, characters: int, tokens: int) -> bool:
        """Whether a text of this many characters has more than `tokens` tokens, as far as its length alone says."""
        if characters <= tokens:  # hardly any token is shorter than a character
            return False
        return self.longest_token is not None and characters > tokens * self.longest_token

    @cached_property
    def special_texts(self) -> "re.Pattern[str] | None":
        """Finds the tokenizer's special tokens in a text. Raises `CatalogueFault`."""
        return special_texts(self.tokenizer)

    @cached_property
    def normalized_special_texts(self) -> "re.Pattern[str] | None":
        """Finds those that the tokenizer looks for in normalized text. Raises `CatalogueFault`."""
        return special_texts(self.tokenizer, is_normalized=True)

    @cached_property
    def template(self) -> PromptTemplate:
        """The chat template of the checkpoint. Raises `CatalogueFault`."""
        try:
            return PromptTemplate.load(self.path)
        except (TemplateFailed, OSError, ValueError) as error:
            raise CatalogueFault("its chat template cannot be read") from error

    @cached_property
    def stop_tokens(self) -> tuple[int, ...]:
        """Token ids that end an answer."""
        for name in ("generation_config.json", "config.json"):
            file = self.path / name
            found = _object(file).get("eos_token_id") if file.is_file() else None
            if found is not None:
                return (found,) if isinstance(found, int) else tuple(found)
        return ()


def special_texts(tokenizer: Tokenizer, *, is_normalized: bool = False) -> "re.Pattern[str] | None":
    """Finds special tokens in a text, the longest first; None for a tokenizer without any (such) ones."""
    added = tokenizer.get_added_tokens_decoder().values()
    texts = {
        one.content
        for one in added
        if one.special and one.content.strip() and (one.normalized or not is_normalized)
    }
    ordered = sorted(texts, key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _object(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CatalogueFault(f"its {file.name} cannot be read") from error
    if not isinstance(read, dict):
        raise CatalogueFault(f"its {file.name} is not an object")
    return cast("dict[str, Any]", read)


def _shapes(file: Path) -> dict[str, list[int]]:
    """From the file's head; its length shows whether all that the head names is there."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            head: dict[str, Any] = json.loads(opened.read(min(length, LONGEST_HEAD)))
        tensors = {name: one for name, one in head.items() if name != "__metadata__"}
        end = max((one["data_offsets"][1] for one in tensors.values()), default=0)
        whole = file.stat().st_size == 8 + length + end
        shapes = {name: list(map(int, one["shape"])) for name, one in tensors.items()}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise CatalogueFault(f"its {file.name} cannot be read") from error
    if not whole:
        raise CatalogueFault(f"its {file.name} is cut or damaged")
    return shapes


class Catalogue:
    """All base models by id."""

    def __init__(self, file: Path | None = None) -> None:
        """The shipped models, then those of `file`. Raises `CatalogueFault`."""
        self._models = {one.id: one for one in (*_shipped(), *_listed(file))}

    def __iter__(self) -> Iterator[CataloguedModel]:
        """Those that can be used, by id."""
        usable = (model for model in self._models.values() if model.fault is None)
        return iter(sorted(usable, key=lambda model: model.id))

    def get(self, identifier: str) -> CataloguedModel | None:
        """The base model with this id, whether it can be used or not."""
        return self._models.get(identifier)

    @property
    def default(self) -> CataloguedModel:
        """The first shipped model; its tokenizer counts a dataset's tokens."""
        return next(iter(self._models.values()))


def _shipped() -> list[CataloguedModel]:
    folders = sorted(one for one in SHIPPED.iterdir() if (one / "config.json").is_file())
    return [
        CataloguedModel(
            id=folder.name,
            path=folder,
            name=folder.name,
            version="1",
            description="Shipped tiny model of US diagnosis texts, for demos and tests",
        )
        for folder in folders
    ]


def _listed(file: Path | None) -> list[CataloguedModel]:
    if file is None:
        return []
    try:
        entries = yaml.safe_load(file.read_text())["models"]
        return [_entry(entry, file.parent) for entry in entries]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise CatalogueFault(
            f"the model catalogue {file} cannot be read: {type(error).__name__}"
        ) from error


def _entry(entry: dict[str, Any], folder: Path) -> CataloguedModel:
    path = folder / str(entry["path"])
    if not path.is_dir():
        path = _cached(str(entry["path"]))
    return CataloguedModel(
        id=str(entry["id"]),
        path=path,
        name=str(entry.get("name", entry["id"])),
        version=str(entry.get("version", "")),
        description=str(entry.get("description", "")),
        **_engine(entry),
    )


def _engine(entry: dict[str, Any]) -> dict[str, Any]:
    runtime, options = entry.get("runtime", OWN_ENGINE.name), entry.get("runtime_options", [])
    if not isinstance(runtime, str) or runtime not in ENGINES:
        raise CatalogueFault(f"the runtime of {entry['id']} must be one of: {', '.join(ENGINES)}")
    if not isinstance(options, list) or (options and not ENGINES[runtime].takes_options):
        raise CatalogueFault(f"the runtime_options of {entry['id']} must be a list, for vllm only")
    return {"runtime": runtime, "runtime_options": tuple(map(str, cast("list[Any]", options)))}


def _cached(hub_id: str) -> Path:
    """The snapshot of a hub id in the local cache; nothing is downloaded."""
    import huggingface_hub  # noqa: PLC0415 - only for hub ids
    from huggingface_hub.errors import LocalEntryNotFoundError  # noqa: PLC0415

    hub: Any = huggingface_hub
    try:
        return Path(hub.snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        raise CatalogueFault(
            f"the model {hub_id} is neither a directory nor in the local cache"
        ) from None
