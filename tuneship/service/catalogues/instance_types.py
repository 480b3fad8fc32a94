"""Which instance types and regions this installation knows: the embedded `local`, and those of the operator's file.

A file is YAML: `regions: [eu-1]` and `instance_types: [{name, compute_type, cpus?, memory_gb?, gpus?, regions?}]`. What
an entry asks for must be there for it to be available; a region is a name for this machine. Bounds nothing that runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError

from tuneship.contract.common import StrictModel
from tuneship.host.machine import GIB, Machine
from tuneship.service.catalogues.base_models import CatalogueFault

# The default type and region of every request, and so always known.
LOCAL = "local"
ShortName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


@dataclass(frozen=True)
class InstanceKind:
    """One type, and what it asks of the machine."""

    name: str
    compute_type: Literal["cpu", "gpu"] | None
    """None is whatever the machine has."""
    cpus: int = 0
    """0, like 0 memory, asks for nothing in particular."""
    memory_gb: float = 0
    gpus: int = 0
    regions: frozenset[str] | None = None
    """None is all."""

    def is_on(self, machine: Machine) -> bool:
        """Whether the machine has what it asks for."""
        return (
            machine.gpus >= self.gpus
            and machine.cpus >= self.cpus
            and machine.memory_bytes >= self.memory_gb * GIB
        )

    def is_in(self, region: str) -> bool:
        """Whether it is offered there."""
        return self.regions is None or region in self.regions

    def compute_on(self, machine: Machine) -> str:
        """`cpu` or `gpu`."""
        return self.compute_type or ("gpu" if machine.gpus else "cpu")


EMBEDDED = (InstanceKind(LOCAL, None), InstanceKind("local-gpu", "gpu", gpus=1))


class _CatalogueEntry(StrictModel):
    name: ShortName
    compute_type: Literal["cpu", "gpu"]
    cpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    memory_gb: Annotated[float, Field(ge=0, le=1 << 20)] = 0
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    regions: Annotated[list[ShortName] | None, Field(min_length=1, max_length=64)] = None


class _File(StrictModel):
    regions: Annotated[list[ShortName], Field(max_length=64)] = Field(default_factory=list[str])
    instance_types: Annotated[list[_CatalogueEntry], Field(max_length=64)] = Field(
        default_factory=list[_CatalogueEntry]
    )


class InstanceCatalogue:
    """All known types and regions."""

    def __init__(self, file: Path | None = None) -> None:
        """The embedded types, and those of `file`, which may replace them. Raises `CatalogueFault`."""
        read = _File() if file is None else _read(file)
        own = [_kind(entry) for entry in read.instance_types]
        self._kinds = {one.name: one for one in (*EMBEDDED, *own)}
        self.regions = (LOCAL, *(name for name in read.regions if name != LOCAL))

    def __iter__(self) -> Iterator[InstanceKind]:
        """In the order of the file, the embedded ones first."""
        return iter(self._kinds.values())

    def get(self, name: str) -> InstanceKind | None:
        """The type of this name."""
        return self._kinds.get(name)


def _kind(entry: _CatalogueEntry) -> InstanceKind:
    fields = entry.model_dump(exclude={"regions"}, exclude_none=True)
    return InstanceKind(
        **fields, regions=None if entry.regions is None else frozenset(entry.regions)
    )


def _read(file: Path) -> _File:
    try:
        read = _File.model_validate(yaml.safe_load(file.read_text()))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise _fault(file, f"it cannot be read: {type(error).__name__}") from error
    except ValidationError as error:
        first: Any = error.errors()[0]
        raise _fault(file, f"{_place(first['loc'])}: {first['msg']}") from error
    _check(file, read)
    return read


def _check(file: Path, read: _File) -> None:
    """What concerns more than one field."""
    seen: set[str] = set()
    for number, entry in enumerate(read.instance_types):
        place = f"instance_types[{number}] ({entry.name})"
        if entry.name in seen:
            raise _fault(file, f"{place}: the name is taken")
        seen.add(entry.name)
        if (entry.compute_type == "gpu") != (entry.gpus > 0):
            wanted = "at least 1" if entry.compute_type == "gpu" else "0"
            raise _fault(file, f"{place}.gpus: must be {wanted} with this compute_type")
        unknown = set(entry.regions or ()) - {LOCAL, *read.regions}
        if unknown:
            raise _fault(file, f"{place}.regions: not listed above: {', '.join(sorted(unknown))}")
    if len(set(read.regions)) < len(read.regions):
        raise _fault(file, "regions: a name stands there twice")


def _place(location: Sequence[str | int]) -> str:
    text = "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in location)
    return text.removeprefix(".") or "the file"


def _fault(file: Path, what: str) -> CatalogueFault:
    return CatalogueFault(f"the instance catalogue {file}: {what}")
