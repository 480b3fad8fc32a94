"""Instance types on the wire: the values of `instance_type`."""

from tuneship.contract.common import Reply
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.verbs import C_co, Resource, Verb


class InstanceType(Reply):
    """A kind of machine. One that is not `available` is refused with `instance_type_unavailable`."""

    name: str
    compute_type: str
    available: bool
    # Cores that the service may use, which a container's limit makes fewer than the machine's.
    cpus: int
    # Main memory that the service may use, in GiB.
    memory_gb: float
    gpus: int


class InstanceTypes(Reply):
    """All known types."""

    instance_types: list[InstanceType]


@operation(
    "GET",
    "/v1/instance-types",
    scope="jobs:read",
    example=Example(
        reply={
            "instance_types": [
                {
                    "name": "local",
                    "compute_type": "cpu",
                    "available": True,
                    "cpus": 2,
                    "memory_gb": 7.6,
                    "gpus": 0,
                }
            ]
        }
    ),
)
def list_instance_types() -> InstanceTypes:
    """List the instance types; those that this installation has are `available`.

    They are `local` and what the operator's file of instance types lists.
    """
    raise NotImplementedError


class InstanceTypeResource(Resource[C_co]):
    """Instance types."""

    list = Verb(list_instance_types)
