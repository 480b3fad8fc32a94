"""A new deployment: which model it serves, on what, and with how many replicas."""

from tuneship.contract.common import ModelId
from tuneship.contract.deployments import (
    DeploymentCreate,
    DeploymentSecuritySettings,
    ModelConfiguration,
)
from tuneship.contract.models import list_models
from tuneship.service.console.forms import Choices, FormField, FormView, fields_of
from tuneship.service.console.page import page
from tuneship.service.console.page_client import MOST_LISTED, PageClient
from tuneship.service.console.pages.new_job import instance_types

SIZE = ("min_replicas", "max_replicas", "auto_scaling", "compute_type", "instance_type")


@page("/console/deployments/new", is_live=False, template="form.html")
async def new_deployment(client: PageClient, model_name: ModelId | None = None) -> FormView:
    """The address may name the model."""
    what = [
        FormField("model_name", "model_name", model_name, choices=await _models(client)),
        FormField("deployment_name", "deployment_name"),
    ]
    machines = {"instance_type": await instance_types(client)}
    defaults = {name: DeploymentCreate.model_fields[name].default for name in SIZE}
    declared = fields_of(DeploymentCreate, "", defaults, choices=machines)
    return FormView(
        title="New deployment",
        says="A model that answers requests. An empty field takes its default.",
        places=(("Deployments", "/console/deployments"), ("New deployment", "")),
        action="create_deployment",
        refused="Nothing was deployed",
        then="/console/deployments",
        sections=(
            ("What it serves", what),
            ("Replicas", [one for one in declared if one.name in SIZE]),
            ("Answers", fields_of(ModelConfiguration, "model_config.", {})),
            (
                "Safeguards",
                fields_of(
                    DeploymentSecuritySettings,
                    "security_settings.",
                    DeploymentSecuritySettings().model_dump(),
                ),
            ),
        ),
    )


async def _models(client: PageClient) -> Choices:
    if not client.may(list_models):
        return ()
    found = (await client.models.list(limit=MOST_LISTED)).models
    return [(one.id, one.name if one.base_model is None else one.id) for one in found]
