"""All resource files of this room: importing one binds its handlers to the declared operations."""

from tuneship.service import (
    datasets,
    deployments,
    endpoints,
    generation,
    jobs,
    metrics,
    models,
)
from tuneship.service.serving_table import SERVED

RESOURCES = (datasets, deployments, endpoints, generation, jobs, metrics, models)

__all__ = ["RESOURCES", "SERVED"]
