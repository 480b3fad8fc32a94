"""The base models: shipped ones, added ones (`tuneship models add`), and those of a catalogue file.

Reads checkpoints' metadata without loading torch. A catalogue is YAML:
`models: [{id, path, name?, version?, description?, runtime?, runtime_options?, weights?, instance_type?}]`.

There `path` is a checkpoint directory or a hub id that is already in the local cache, `runtime` names the engine that
serves it, `weights` the number format in which our own engine does, and `instance_type` the type of its replicas where
Ray places them. Code from a checkpoint is never run.
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import yaml
from tokenizers import Tokenizer, pre_tokenizers

from tuneship.host.startup import StartupError
from tuneship.host.weight_files import ADAPTER_CONFIG, WeightsFault, weight_files
from tuneship.prompts.template import PromptTemplate, TemplateFailed
from tuneship.prompts.text_format import ModelTextFormat
from tuneship.prompts.text_tokenizer import TokenizerFault, check_kind, load_tokenizer
from tuneship.replicas.engine_kinds import (
    ENGINES,
    OWN_ENGINE,
    VLLM_RANK_OPTION,
    VLLM_RANKS,
    EngineKind,
)
from tuneship.service.catalogues.origins import MODEL_ID, Origin
from tuneship.service.catalogues.token_texts import TokenTexts
from tuneship.serving.weights import WEIGHTS

# Architectures with their own kind of attention, which the engine rejects when it loads them: they
# would train and then not be served. For others like them the deployment fails with the reason.
NOT_SERVED = frozenset({"bloom", "codegen", "falcon", "gpt_neo", "gpt_oss", "gptj", "mpt"})
# The context length for a configuration that names none.
FALLBACK_CONTEXT_TOKENS = 2048
# The limit of the safetensors library.
MAX_HEADER_BYTES = 100_000_000
# The most characters that a tokenizer's normalizer composes into one.
COMPOSED_CHARACTERS = {None: 1, "NFC": 4}
# The part of a tensor's name that numbers the layers, in Llama and most others, Falcon, and MPT.
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
    # The name of the engine that serves it: `replica`, the service's own, or `vllm`.
    runtime: str = OWN_ENGINE.name
    # More options for the command that starts vLLM for it.
    runtime_options: tuple[str, ...] = ()
    # The number format in which our engine holds its weights, one of `WEIGHTS`; None: by size and machine.
    weights: str | None = None
    # The instance type of its replicas where Ray places them; None: `local`.
    instance_type: str | None = None
    # Whether nothing was found that forbids to tune it when it was added; jobs look again.
    is_tunable: bool = True

    @cached_property
    def fault(self) -> str | None:
        """Why the model cannot be used, as far as can be seen without loading it; None if no reason is known."""
        try:
            _ = self.tensors, self.context_length
            kind = _object(self.path / "config.json").get("model_type")
            _template(self.path)
        except CatalogueFault as fault:
            return str(fault)
        if self.engine.is_own and kind in NOT_SERVED:
            return f"{kind} models cannot be served by this service's own engine, so none is tuned either"
        if (self.path / ADAPTER_CONFIG).is_file():
            # transformers applies the adapter when it loads the model, so it would be trained with it.
            return "it holds an adapter beside its weights: merge it, or move its adapter_config.json elsewhere"
        return None if (self.path / "tokenizer.json").is_file() else "it has no tokenizer.json"

    @cached_property
    def origin(self) -> Origin | None:
        """Its origin; None for one that is shipped or that the operator's file names."""
        try:
            return Origin.read(self.path)
        except (OSError, ValueError):
            return None

    @property
    def hub_id(self) -> str | None:
        """The hub's id that it was added from; None for another source."""
        return self.origin.source if self.origin and self.origin.kind == "hub" else None

    @cached_property
    def licence(self) -> str | None:
        """The licence that its source names."""
        return self.origin.licence if self.origin else named_licence(self.path)

    @property
    def engine(self) -> EngineKind:
        """The engine that `runtime` names."""
        return ENGINES[self.runtime]

    @cached_property
    def tensors(self) -> dict[str, list[int]]:
        """Name and shape of every weight, from the headers of its files (`weight_files`). Raises `CatalogueFault`."""
        try:
            weights = weight_files(self.path)
        except WeightsFault as fault:
            raise CatalogueFault(str(fault)) from None
        shapes = {
            name: shape for file in weights.files for name, shape in tensor_shapes(file).items()
        }
        lost = sorted(weights.tensors - shapes.keys())
        if lost:
            raise CatalogueFault(f"its index names the tensor {lost[0]}, which no file has")
        return shapes

    @cached_property
    def parameters(self) -> int:
        """The number of parameters in the checkpoint."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    @cached_property
    def context_length(self) -> int:
        """The most tokens of prompt and completion together. Raises `CatalogueFault`."""
        config = _object(self.path / "config.json")
        length = config.get("max_position_embeddings") or config.get("n_positions")
        if length is not None and not isinstance(length, int):
            raise CatalogueFault("config.json names a context length that is no number")
        return length or FALLBACK_CONTEXT_TOKENS

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
            return load_tokenizer(self.path)
        except TokenizerFault as fault:
            raise CatalogueFault(str(fault)) from fault

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens. Raises `CatalogueFault`."""
        return TokenTexts(self.tokenizer)

    @cached_property
    def vocabulary(self) -> int:
        """The number of token ids that the model knows."""
        size = _object(self.path / "config.json").get("vocab_size")
        return size if isinstance(size, int) else self.tokenizer.get_vocab_size()

    @cached_property
    def hidden_size(self) -> int | None:
        """The length of a hidden state; None if config.json does not give it."""
        config = _object(self.path / "config.json")
        size = config.get("hidden_size") or config.get("n_embd")
        return size if isinstance(size, int) else None

    @cached_property
    def longest_token(self) -> int | None:
        """The maximum number of characters of one token; None if the tokenizer may remove text.

        It is known for byte-level tokenizers: those of GPT-2, Llama 3, Qwen and the shipped model.
        """
        rules: Any = json.loads(cast("Any", self.tokenizer).to_str())
        pre_tokenizer: Any = rules["pre_tokenizer"] or {"type": None}
        steps: list[Any] = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
        kinds = {step["type"] for step in steps}
        vocabulary: dict[str, int] = rules["model"].get("vocab", {})
        alphabet: list[str] = cast("Any", pre_tokenizers.ByteLevel).alphabet()
        normalizer: str | None = (rules["normalizer"] or {"type": None})["type"]
        may_remove_text = (
            normalizer not in COMPOSED_CHARACTERS
            or rules["model"]["type"] != "BPE"
            or not {"ByteLevel"} <= kinds <= {"ByteLevel", "Digits", "Split"}
            or any(step.get("behavior") == "Removed" for step in steps)
            or any(token["lstrip"] or token["rstrip"] for token in rules["added_tokens"])
            or not vocabulary.keys() >= set(alphabet)
        )
        if may_remove_text:
            return None
        return COMPOSED_CHARACTERS[normalizer] * max(map(len, vocabulary))

    def is_surely_longer(self, characters: int, tokens: int) -> bool:
        """Whether a text of this many characters certainly has more than `tokens` tokens."""
        # Hardly any token is shorter than a character.
        if characters <= tokens:
            return False
        return self.longest_token is not None and characters > tokens * self.longest_token

    @property
    def is_read(self) -> bool:
        """Whether `read` has been called: the event loop then finds all that it looks up."""
        return {"tokenizer", "token_texts", "vocabulary", "longest_token"} <= vars(self).keys()

    def read(self) -> None:
        """Read the tokenizer and the values derived from it, which is slow for a large one. Raises `CatalogueFault`."""
        _ = self.tokenizer, self.token_texts, self.vocabulary, self.longest_token

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The tokenizer's special tokens by their texts. Raises `CatalogueFault`."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @cached_property
    def text_format(self) -> ModelTextFormat:
        """How the model reads and writes conversations. Raises `CatalogueFault`."""
        try:
            check_kind(self.tokenizer)
            found = ModelTextFormat.of_base(self.path, self.tokenizer)
        except TokenizerFault as fault:
            raise CatalogueFault(str(fault)) from fault
        except (TemplateFailed, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CatalogueFault("its chat template cannot be read") from error
        if found.fault is not None:
            raise CatalogueFault(found.fault)
        return found

    @cached_property
    def tuning_fault(self) -> str | None:
        """Why the model cannot be tuned, as far as can be seen without loading it; None if no reason is known."""
        try:
            return self.text_format.tuning_fault
        except CatalogueFault as fault:
            return str(fault)


def named_licence(folder: Path) -> str | None:
    """The licence that the model card of a checkpoint names."""
    try:
        card = (folder / "README.md").read_text(encoding="utf-8")
        header: Any = yaml.safe_load(card.split("---\n", 2)[1]) if card.startswith("---\n") else {}
        named = header.get("license")
    except (OSError, ValueError, yaml.YAMLError, IndexError, AttributeError):
        return None
    return named if isinstance(named, str) and named else None


def _template(path: Path) -> PromptTemplate:
    """The chat template of a checkpoint. Raises `CatalogueFault`."""
    try:
        return PromptTemplate.load(path)
    except (TemplateFailed, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        why = f": {error}" if isinstance(error, TemplateFailed) else ""
        raise CatalogueFault(f"its chat template cannot be read{why}") from error


def _object(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CatalogueFault(f"its {file.name} cannot be read") from error
    if not isinstance(read, dict):
        raise CatalogueFault(f"its {file.name} is not an object")
    return cast("dict[str, Any]", read)


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """The shapes in the header of a safetensors file. Raises `CatalogueFault`, also for a file that is cut."""
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header: dict[str, Any] = json.loads(opened.read(min(length, MAX_HEADER_BYTES)))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        is_complete = file.stat().st_size == 8 + length + end
        shapes = {name: list(map(int, tensor["shape"])) for name, tensor in tensors.items()}
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise CatalogueFault(f"its {file.name} cannot be read") from error
    if not is_complete:
        raise CatalogueFault(f"its {file.name} is cut or damaged")
    return shapes


class AddedModels:
    """The base models in a folder that `tuneship models add` fills, also while the service runs."""

    def __init__(self, folder: Path) -> None:
        """`folder` may be missing."""
        self._folder = folder
        self._known: dict[tuple[str, int, int], CataloguedModel] = {}

    def present(self) -> Mapping[str, CataloguedModel]:
        """The models that are there now, by id. Looks at the folder's entries alone unless one is new."""
        found: dict[tuple[str, int, int], CataloguedModel] = {}
        entries = list[os.DirEntry[str]]()
        with suppress(FileNotFoundError), os.scandir(self._folder) as scanned:
            entries.extend(scanned)
        for entry in entries:
            # What is being added or removed has a name with a dot.
            if not (MODEL_ID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)):
                continue
            try:
                state = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # it has just been removed
                continue
            # A model of the same name that replaced another differs in the second or third.
            key = (entry.name, state.st_ino, state.st_ctime_ns)
            found[key] = self._known.get(key) or _added(Path(entry.path))
        self._known = found
        return {model.id: model for model in found.values()}


def _added(folder: Path) -> CataloguedModel:
    try:
        origin = Origin.read(folder)
    except (OSError, ValueError):
        return CataloguedModel(folder.name, folder, folder.name, "1", "Added base model")
    licence = f", licence {origin.licence}" if origin.licence else ""
    description = f"Added from {origin.source} ({origin.kind}){licence}"
    return CataloguedModel(
        folder.name,
        folder,
        folder.name,
        "1",
        description,
        weights=origin.weights,
        is_tunable=origin.tuning_fault is None,
    )


class Catalogue:
    """All base models by id."""

    def __init__(self, file: Path | None = None, added: Path | None = None) -> None:
        """Read the shipped models and those of `file`; `added` is the folder of added ones. Raises `CatalogueFault`."""
        folders = sorted(path for path in SHIPPED.iterdir() if (path / "config.json").is_file())
        description = "Shipped tiny model of US diagnosis texts, for demos and tests"
        self.shipped: Mapping[str, CataloguedModel] = {
            folder.name: CataloguedModel(folder.name, folder, folder.name, "1", description)
            for folder in folders
        }
        self.listed: Mapping[str, CataloguedModel] = {
            model.id: model for model in catalogue_entries(file)
        }
        self._added = None if added is None else AddedModels(added)

    @property
    def added(self) -> Mapping[str, CataloguedModel]:
        """The added models that are there now."""
        return {} if self._added is None else self._added.present()

    def __iter__(self) -> Iterator[CataloguedModel]:
        """The models that can be used, by id."""
        models = {**self.added, **self.shipped, **self.listed}
        usable = (model for model in models.values() if model.fault is None)
        return iter(sorted(usable, key=lambda model: model.id))

    def weights_of(self, path: Path) -> str | None:
        """The number format for serving the model of a folder; None: chosen by size and machine."""
        model = self.at(path)
        return None if model is None else model.weights

    def at(self, path: Path) -> CataloguedModel | None:
        """The model of a folder, which decides how all ids of the folder are served."""
        models = (*self.listed.values(), *self.shipped.values(), *self.added.values())
        return next((model for model in models if model.path == path), None)

    def get(self, identifier: str) -> CataloguedModel | None:
        """The base model with this id, also one that cannot be used. The operator's file decides over a name."""
        known = self.listed.get(identifier) or self.shipped.get(identifier)
        return known or self.added.get(identifier)

    @property
    def default(self) -> CataloguedModel:
        """The first shipped model; its tokenizer counts a dataset's tokens."""
        first = next(iter(self.shipped))
        return self.listed.get(first) or self.shipped[first]


def catalogue_entries(file: Path | None) -> list[CataloguedModel]:
    """The models of a catalogue file. Raises `CatalogueFault`."""
    if file is None:
        return []
    try:
        entries = yaml.safe_load(file.read_text())["models"]
        models = [_entry(entry, file.parent) for entry in entries]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise CatalogueFault(
            f"the file of base models {file} cannot be read: {type(error).__name__}"
        ) from error
    by_path: dict[Path, CataloguedModel] = {}
    for model in models:
        other = by_path.setdefault(model.path, model)
        for name in ("weights", "instance_type"):
            if getattr(other, name) != getattr(
                model, name
            ):  # one process serves all ids of a folder
                raise CatalogueFault(
                    f"the {name} of {other.id} and {model.id} must be the same: they are one folder"
                )
    return models


def _entry(entry: dict[str, Any], folder: Path) -> CataloguedModel:
    path = folder / str(entry["path"])
    if not path.is_dir():
        path = cached_snapshot(str(entry["path"]))
    runtime, options = entry.get("runtime", OWN_ENGINE.name), entry.get("runtime_options", [])
    if not isinstance(runtime, str) or runtime not in ENGINES:
        raise CatalogueFault(f"the runtime of {entry['id']} must be one of: {', '.join(ENGINES)}")
    if not isinstance(options, list) or (options and not ENGINES[runtime].takes_options):
        raise CatalogueFault(f"the runtime_options of {entry['id']} must be a list, for vllm only")
    options = tuple(map(str, cast("list[Any]", options)))
    try:
        ENGINES[runtime].largest_rank(options)
    except ValueError:
        ranks = ", ".join(map(str, VLLM_RANKS))
        raise CatalogueFault(
            f"the {VLLM_RANK_OPTION} of {entry['id']} must be one of: {ranks}"
        ) from None
    weights = entry.get("weights")
    if weights is not None:
        if not ENGINES[runtime].is_own:
            raise CatalogueFault(
                f"the weights of {entry['id']} are chosen by runtime_options of vllm"
            )
        if weights not in WEIGHTS:
            raise CatalogueFault(
                f"the weights of {entry['id']} must be one of: {', '.join(WEIGHTS)}"
            )
    return CataloguedModel(
        id=str(entry["id"]),
        path=path,
        name=str(entry.get("name", entry["id"])),
        version=str(entry.get("version", "")),
        description=str(entry.get("description", "")),
        runtime=runtime,
        runtime_options=options,
        weights=None if weights is None else str(weights),
        instance_type=None if "instance_type" not in entry else str(entry["instance_type"]),
    )


def cached_snapshot(hub_id: str) -> Path:
    """The snapshot of a hub id in the local cache; nothing is downloaded. Raises `CatalogueFault`."""
    import huggingface_hub  # noqa: PLC0415 - only for hub ids
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError  # noqa: PLC0415

    hub: Any = huggingface_hub
    try:
        return Path(hub.snapshot_download(hub_id, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        text = f"the model {hub_id} is neither a directory nor in the local cache"
        remedy = f": `hf download {hub_id}` downloads it" if "/" in hub_id else ""
        raise CatalogueFault(text + remedy) from None
