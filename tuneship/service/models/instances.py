"""Handler of instance types, and the checks that a job or deployment names a type that this machine has."""

from collections.abc import Sequence

from tuneship.contract import instances as contract
from tuneship.contract.deployments import DeploymentCreate
from tuneship.contract.errors import InstanceTypeUnavailable
from tuneship.contract.instances import InstanceType, InstanceTypes
from tuneship.host.machine import GIB, Machine, this_machine
from tuneship.service.catalogues.base_models import CataloguedModel
from tuneship.service.catalogues.instance_types import InstanceKind
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context


@serves(contract.list_instance_types)
def list_instance_types(context: Context) -> InstanceTypes:
    """List the catalogue's types, the same for every caller; an entry without sizes has those of the machine."""
    settings = context.parts.settings
    place = _place(context, None)
    return InstanceTypes(
        instance_types=[
            InstanceType(
                name=kind.name,
                compute_type=kind.compute_on(place),
                available=settings.agents == "ray" or kind.is_on(place),
                cpus=kind.cpus or place.cpus,
                memory_gb=kind.memory_gb or round(place.memory_bytes / GIB, 1),
                gpus=place.gpus if kind.compute_type is None else kind.gpus,
            )
            for kind in context.parts.instances
        ]
    )


def require_serving_type(
    context: Context, deployment: DeploymentCreate, base: CataloguedModel
) -> None:
    """Raise `InstanceTypeUnavailable` for a type or region that is not here, or is not used for this base (§7)."""
    kind = _kind(context, deployment.instance_type, "instance_type")
    regions = context.parts.instances.regions
    if deployment.region not in regions:
        raise _unknown("region", regions)
    place, uses_gpus = _place(context, base), base.engine.uses_gpus
    is_here = kind.is_on(place) and kind.is_in(deployment.region)
    if not is_here or (kind.gpus and not uses_gpus):
        raise _unavailable("instance_type")
    if deployment.compute_type == "gpu" and not (uses_gpus and place.gpus):
        text = "this installation serves the model on CPU cores"
        raise InstanceTypeUnavailable(text, param="compute_type")


def require_training_type(context: Context, name: str, param: str) -> None:
    """Raise `InstanceTypeUnavailable` for an unavailable type. A training uses a GPU if there is one, whatever its
    type.
    """
    kind = _kind(context, name, param)
    # Which nodes Ray has, or may yet add, is known to the operator who wrote the file.
    if context.parts.settings.agents != "ray" and not kind.is_on(this_machine()):
        raise _unavailable(param)


def _place(context: Context, base: CataloguedModel | None) -> Machine:
    """The resources of this machine, or those that Ray reserves for each replica."""
    parts = context.parts
    if parts.settings.agents != "ray":
        return this_machine()
    # The deployments of a base model share its replicas, so these have one size, whatever the deployments name.
    size = parts.instances.of_replicas(base).agent_size(parts.settings)
    return Machine(max(1, int(size.cpus)), size.memory_bytes, int(size.gpus))


def _kind(context: Context, name: str, param: str) -> InstanceKind:
    instances = context.parts.instances
    kind = instances.get(name)
    if kind is None:
        raise _unknown(param, sorted(known.name for known in instances))
    return kind


def _unknown(param: str, known: Sequence[str]) -> InstanceTypeUnavailable:
    text = f"{param} names nothing that this installation has; it has: {', '.join(known)}"
    return InstanceTypeUnavailable(text, param=param)


def _unavailable(param: str) -> InstanceTypeUnavailable:
    return InstanceTypeUnavailable(f"this installation has no {param} of that type", param=param)
