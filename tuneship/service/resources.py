"""All resource files of this room: importing one binds its handlers to the declared operations."""

from tuneship.service import (
    audit,
    dataset_merging,
    datasets,
    deployment_logs,
    deployments,
    endpoints,
    events,
    generation,
    instances,
    jobs,
    metrics,
    models,
    webhooks,
)
from tuneship.service.serving_table import SERVED

RESOURCES = (
    audit,
    dataset_merging,
    datasets,
    deployment_logs,
    deployments,
    endpoints,
    events,
    generation,
    instances,
    jobs,
    metrics,
    models,
    webhooks,
)

__all__ = ["RESOURCES", "SERVED"]
