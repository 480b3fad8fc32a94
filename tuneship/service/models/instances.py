"""Handler of instance types, and the checks that a job or deployment names a type that this machine has."""

from collections.abc import Sequence

from tuneship.contract import instances as contract
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.errors import InstanceTypeUnavailable
from tuneship.contract.instances import InstanceType, InstanceTypes
from tuneship.host.machine import GIB, this_machine
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.catalogues.instance_types import InstanceKind
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context, Parts


@serves(contract.list_instance_types)
def list_instance_types(context: Context) -> InstanceTypes:
    """List the catalogue's types, the same for every caller; an entry without sizes has those of the machine."""
    machine = this_machine()
    return InstanceTypes(
        instance_types=[
            InstanceType(
                name=kind.name,
                compute_type=kind.compute_on(machine),
                available=kind.is_on(machine),
                cpus=kind.cpus or machine.cpus,
                memory_gb=kind.memory_gb or round(machine.memory_bytes / GIB, 1),
                gpus=machine.gpus if kind.compute_type is None else kind.gpus,
            )
            for kind in context.parts.instances
        ]
    )


def require_serving_type(parts: Parts, deployment: DeploymentCreate, base: CataloguedModel) -> None:
    """Raise `InstanceTypeUnavailable` for a type or region that is not here, or is not used for this base (§7)."""
    kind = _kind(parts, deployment.instance_type, "instance_type")
    if deployment.region not in parts.instances.regions:
        raise _unknown("region", parts.instances.regions)
    machine, uses_gpus = this_machine(), base.engine.uses_gpus
    is_here = kind.is_on(machine) and kind.is_in(deployment.region)
    if not is_here or (kind.gpus and not uses_gpus):
        raise _unavailable("instance_type")
    if deployment.compute_type == "gpu" and not (uses_gpus and machine.gpus):
        text = "this installation serves the model on CPU cores"
        raise InstanceTypeUnavailable(text, param="compute_type")


def require_training_type(parts: Parts, name: str, param: str) -> None:
    """Raise `InstanceTypeUnavailable` for a type that is not here; a training uses a GPU where there is one."""
    if not _kind(parts, name, param).is_on(this_machine()):
        raise _unavailable(param)


def _kind(parts: Parts, name: str, param: str) -> InstanceKind:
    kind = parts.instances.get(name)
    if kind is None:
        raise _unknown(param, sorted(known.name for known in parts.instances))
    return kind


def _unknown(param: str, known: Sequence[str]) -> InstanceTypeUnavailable:
    text = f"{param} names nothing that this installation has; it has: {', '.join(known)}"
    return InstanceTypeUnavailable(text, param=param)


def _unavailable(param: str) -> InstanceTypeUnavailable:
    return InstanceTypeUnavailable(f"this installation has no {param} of that type", param=param)
