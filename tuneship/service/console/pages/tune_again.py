"""A new job with the parameters of another one, to change what is to be changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tuneship.contract.common import JobId
from tuneship.contract.errors import ModelNotFound
from tuneship.contract.jobs import ComputeConfig, Hyperparameters, Job, JobSecuritySettings
from tuneship.contract.models import HyperparameterLimits, get_model_limits
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient

GROUPS: Mapping[str, type[BaseModel]] = {
    "hyperparameters": Hyperparameters,
    "compute_config": ComputeConfig,
    "security_settings": JobSecuritySettings,
}


@dataclass(frozen=True)
class TuneAgainView:
    """The job that is repeated, and by group the declared fields with its values; a list is texts with commas."""

    job: Job
    groups: Mapping[str, Mapping[str, Any]]
    # The possible values of a field that has few.
    choices: Mapping[str, Sequence[str]]
    limits: Mapping[str, HyperparameterLimits]


@page("/console/jobs/{job_id}/again", is_live=False)
async def tune_again(client: PageClient, job_id: JobId) -> TuneAgainView:
    """Only fields that `create_job` declares; the service checks what is sent."""
    job = await client.jobs.get(job_id)
    groups: dict[str, dict[str, Any]] = {}
    choices: dict[str, Sequence[str]] = {}
    for group, model in GROUPS.items():
        values: Mapping[str, Any] = getattr(job, group)
        groups[group] = {name: values.get(name) for name in model.model_fields}
        fields = model.model_json_schema()["properties"]
        choices |= {name: one["enum"] for name, one in fields.items() if "enum" in one}
    limits: Mapping[str, HyperparameterLimits] = {}
    if client.may(get_model_limits):
        try:
            limits = (await client.models.limits(job.base_model)).hyperparameters
        except ModelNotFound:
            # The catalogue has lost it: the service will say so.
            limits = {}
    return TuneAgainView(job, groups, choices, limits)
