"""The instance types and regions of this installation: the built-in `local`, and those of the operator's file.

A file is YAML: `regions: [eu-1]` and `instance_types: [{name, compute_type, cpus?, memory_gb?, gpus?, regions?,
node_labels?}]`. A region names this installation. On one machine a type is available where the machine has its
resources, and limits nothing that runs. Where Ray places agents, it sets a type's resources aside for each training and
for each replica of a base model whose entry in the model catalogue names the type.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from tuneship.agents.launchers import AgentSize
from tuneship.contract.common import StrictModel
from tuneship.host.machine import GIB, Machine
from tuneship.host.operator_files import read_yaml
from tuneship.service.catalogues.base_models import CataloguedModel, CatalogueFault
from tuneship.settings import AgentSettings

# The default type and region of every request, which therefore always exist.
LOCAL = "local"
ShortName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
# As Ray has them, e.g. `ray.io/accelerator-type`.
LabelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]


@dataclass(frozen=True)
class InstanceKind:
    """An instance type and the resources that it needs."""

    name: str
    # None: the machine's own.
    compute_type: Literal["cpu", "gpu"] | None
    # 0, like 0 memory, needs no particular number.
    cpus: int = 0
    memory_gb: float = 0
    gpus: int = 0
    # None: all regions.
    regions: frozenset[str] | None = None
    # Labels of the nodes on which Ray may place an agent of this type.
    node_labels: Mapping[str, str] = field(default_factory=dict[str, str])

    def is_on(self, machine: Machine) -> bool:
        """Whether the machine has the resources."""
        return (
            machine.gpus >= self.gpus
            and machine.cpus >= self.cpus
            and machine.memory_bytes >= self.memory_gb * GIB
        )

    def is_in(self, region: str) -> bool:
        """Whether the type is offered in a region."""
        return self.regions is None or region in self.regions

    def agent_size(self, settings: AgentSettings) -> AgentSize:
        """The size of an agent for this type; missing values come from the settings."""
        return AgentSize(
            cpus=self.cpus or settings.agent_cpus,
            gpus=settings.agent_gpus if self.compute_type is None else self.gpus,
            memory_bytes=int(self.memory_gb * GIB) or settings.agent_memory_bytes,
            labels=self.node_labels,
        )

    def compute_on(self, machine: Machine) -> str:
        """The compute type on a machine: `cpu` or `gpu`."""
        return self.compute_type or ("gpu" if machine.gpus else "cpu")


EMBEDDED = (InstanceKind(LOCAL, None), InstanceKind("local-gpu", "gpu", gpus=1))


class _CatalogueEntry(StrictModel):
    name: ShortName
    compute_type: Literal["cpu", "gpu"]
    cpus: Annotated[int, Field(ge=1, le=4096)] | None = None
    memory_gb: Annotated[float, Field(ge=0, le=1 << 20)] = 0
    gpus: Annotated[int, Field(ge=0, le=64)] = 0
    regions: Annotated[list[ShortName] | None, Field(min_length=1, max_length=64)] = None
    node_labels: Annotated[dict[LabelName, ShortName], Field(max_length=16)] = Field(
        default_factory=dict[str, str]
    )


class _File(StrictModel):
    regions: Annotated[list[ShortName], Field(max_length=64)] = Field(default_factory=list[str])
    instance_types: Annotated[list[_CatalogueEntry], Field(max_length=64)] = Field(
        default_factory=list[_CatalogueEntry]
    )


class InstanceCatalogue:
    """All known types and regions."""

    def __init__(self, file: Path | None = None) -> None:
        """Read the embedded types, and those of `file`, which may replace them. Raises `CatalogueFault`."""
        read = _File() if file is None else read_file(file)
        self._kinds = {kind.name: kind for kind in EMBEDDED}
        for entry in read.instance_types:
            fields = entry.model_dump(exclude={"regions"}, exclude_none=True)
            regions = None if entry.regions is None else frozenset(entry.regions)
            self._kinds[entry.name] = InstanceKind(**fields, regions=regions)
        self.regions = (LOCAL, *(name for name in read.regions if name != LOCAL))

    def __iter__(self) -> Iterator[InstanceKind]:
        """The embedded types, then the others in the order of the file."""
        return iter(self._kinds.values())

    def get(self, name: str) -> InstanceKind | None:
        """The type with this name."""
        return self._kinds.get(name)

    def of_training(self, name: str) -> InstanceKind:
        """The type with this name. One that was taken out of the file after its job was created says nothing."""
        return self.get(name) or EMBEDDED[0]

    def of_replicas(self, base: CataloguedModel | None) -> InstanceKind:
        """The type for a base model's replicas on Ray. Raises `CatalogueFault` for an unknown one."""
        name = LOCAL if base is None or base.instance_type is None else base.instance_type
        if (kind := self.get(name)) is None:
            raise CatalogueFault(f"the file of base models names an unknown instance_type: {name}")
        return kind


def read_file(file: Path) -> _File:
    """Read and check an instance catalogue. Raises `CatalogueFault`."""
    read = read_yaml(file, _File, "file of instance types", CatalogueFault)
    seen: set[str] = set()
    for number, entry in enumerate(read.instance_types):
        path = f"instance_types[{number}] ({entry.name})"
        if entry.name in seen:
            raise _fault(file, f"{path}: the name is taken")
        seen.add(entry.name)
        if (entry.compute_type == "gpu") != (entry.gpus > 0):
            wanted = "at least 1" if entry.compute_type == "gpu" else "0"
            raise _fault(file, f"{path}.gpus: must be {wanted} with this compute_type")
        unknown = set(entry.regions or ()) - {LOCAL, *read.regions}
        if unknown:
            raise _fault(file, f"{path}.regions: not listed above: {', '.join(sorted(unknown))}")
    if len(set(read.regions)) < len(read.regions):
        raise _fault(file, "regions: a name is listed twice")
    return read


def _fault(file: Path, what: str) -> CatalogueFault:
    return CatalogueFault(f"the file of instance types {file}: {what}")
