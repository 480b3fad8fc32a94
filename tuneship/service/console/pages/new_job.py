"""A new job: with the defaults of its base model, or with the parameters of another job."""

from collections.abc import Mapping
from typing import Any

from tuneship.contract.common import DatasetId, JobId, ModelId, count
from tuneship.contract.datasets import DatasetStatus, list_datasets
from tuneship.contract.errors import ModelNotFound
from tuneship.contract.instances import list_instance_types
from tuneship.contract.jobs import ComputeConfig, Hyperparameters, Job, JobSecuritySettings
from tuneship.contract.models import ModelLimits, get_model_limits, list_models
from tuneship.service.console.forms import (
    Choices,
    FormField,
    FormView,
    fields_of,
    limits_in_words,
)
from tuneship.service.console.page import page
from tuneship.service.console.page_client import MOST_LISTED, PageClient
from tuneship.service.console.rendering import place
from tuneship.service.console.words import day

JOBS = ("Jobs", "/console/jobs")
NONE_HELD_OUT = ("", "a tenth of the dataset")


@page("/console/jobs/new", is_live=False, template="form.html")
async def new_job(
    client: PageClient, base_model: ModelId | None = None, dataset_id: DatasetId | None = None
) -> FormView:
    """The base model decides on limits and defaults, so it is chosen first."""
    bases = await base_models(client)
    chosen = base_model or next((one for one, _ in bases), "")
    limits = await _limits(client, chosen)
    defaults = {name: one.default for name, one in limits.hyperparameters.items()} if limits else {}
    datasets = await _datasets(client)
    made = [
        FormField("model_name", "model_name"),
        FormField("dataset_id", "dataset_id", dataset_id, choices=datasets),
        FormField(
            "validation_dataset_id", "validation_dataset_id", "", choices=(NONE_HELD_OUT, *datasets)
        ),
        FormField(
            "validation_frequency", "validation_frequency", 0.1, "share of an epoch, or steps"
        ),
    ]
    values = {
        "hyperparameters": defaults,
        "compute_config": ComputeConfig().model_dump(),
        "security_settings": JobSecuritySettings().model_dump(),
    }
    return FormView(
        title="New job",
        says=f"Train {chosen or 'a base model'} on one of your datasets. An empty field takes its default.",
        places=(JOBS, ("New job", "")),
        action="create_job",
        refused="No job was made",
        then="/console/jobs",
        sections=(("Made of", made), *await _groups(client, values, limits)),
        hidden={"base_model": chosen},
        first=FormField("base_model", "Base model", chosen, choices=bases) if bases[1:] else None,
        blocked="" if datasets else "A job needs a dataset.",
        other=None if datasets else ("Upload a dataset.", "/console/datasets/new"),
    )


@page("/console/jobs/{job_id}/again", is_live=False, template="form.html")
async def tune_again(client: PageClient, job_id: JobId) -> FormView:
    """Only fields that `create_job` declares; the service checks what is sent."""
    job = await client.jobs.get(job_id)
    limits = await _limits(client, job.base_model)
    datasets = await _datasets(client)
    made = [
        FormField("model_name", "model_name", job.model_name),
        FormField("base_model", "base_model", job.base_model, choices=await base_models(client)),
        FormField("dataset_id", "dataset_id", job.dataset_id, choices=datasets),
        FormField(
            "validation_dataset_id",
            "validation_dataset_id",
            job.validation_dataset_id,
            choices=(NONE_HELD_OUT, *datasets),
        ),
        FormField("fine_tuning_method", "fine_tuning_method", job.fine_tuning_method),
        FormField(
            "validation_frequency",
            "validation_frequency",
            job.validation_frequency,
            "share of an epoch, or steps",
        ),
    ]
    if job.comparison:
        made += [
            FormField("comparison.model", "comparison: model", job.comparison.model),
            FormField("comparison.seed", "comparison: seed", job.comparison.seed),
        ]
    tags = [FormField(f"tags.{name}", name, text) for name, text in job.tags.items()]
    return FormView(
        title=f"Tune {job.model_name} again",
        says="A new job with the parameters of this one. Change what should differ; an empty field takes its "
        "default.",
        places=(JOBS, (job.model_name, place(f"/jobs/{job.id}")), ("Tune again", "")),
        action="create_job",
        refused="No job was made",
        then="/console/jobs",
        sections=(
            ("Made of", made),
            *await _groups(client, _values(job), limits),
            *([("Tags", tags)] if tags else []),
        ),
    )


def _values(job: Job) -> Mapping[str, Mapping[str, Any]]:
    return {
        "hyperparameters": job.hyperparameters,
        "compute_config": job.compute_config,
        "security_settings": job.security_settings,
    }


async def _groups(
    client: PageClient, values: Mapping[str, Mapping[str, Any]], limits: ModelLimits | None
) -> list[tuple[str, list[FormField]]]:
    hints = (
        {name: limits_in_words(one) for name, one in limits.hyperparameters.items()}
        if limits
        else {}
    )
    machines = await instance_types(client)
    return [
        (
            "Hyperparameters",
            fields_of(Hyperparameters, "hyperparameters.", values["hyperparameters"], hints),
        ),
        (
            "Machine",
            fields_of(
                ComputeConfig,
                "compute_config.",
                values["compute_config"],
                choices={"instance_type": machines},
            ),
        ),
        (
            "Safeguards",
            fields_of(JobSecuritySettings, "security_settings.", values["security_settings"]),
        ),
    ]


async def instance_types(client: PageClient) -> Choices:
    """The types of machines that this installation has; none where the session may not read them."""
    if not client.may(list_instance_types):
        return ()
    found = (await client.instance_types.list()).instance_types
    return [(one.name, one.name) for one in found if one.available]


async def base_models(client: PageClient) -> Choices:
    """Those that can be tuned; none where the session may not read models."""
    if not client.may(list_models):
        return ()
    found = (await client.models.list(limit=MOST_LISTED)).models
    return [(one.id, one.name) for one in found if one.supported_fine_tuning]


async def _datasets(client: PageClient) -> Choices:
    """The newest that can be trained on."""
    if not client.may(list_datasets):
        return ()
    found = (await client.datasets.list(limit=MOST_LISTED)).datasets
    return [
        (one.id, f"{one.name}, {count(one.num_examples, 'example')}, {day(one.created_at)}")
        for one in found
        if one.status == DatasetStatus.PROCESSED
    ]


async def _limits(client: PageClient, base_model: str) -> ModelLimits | None:
    if not client.may(get_model_limits):
        return None
    try:
        return await client.models.limits(base_model)
    except ModelNotFound:
        # The catalogue has lost it: the service will say so.
        return None
