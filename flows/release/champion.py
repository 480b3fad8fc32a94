"""The champion: the endpoint's deployment at 100 %, its model, and how well that model did in its training.

Found by calls of the API alone, so that nothing has to be remembered between two releases. Next: the gate "T4 champion"
in `tuneship/gates/training/training_gates.py`.
"""

from dataclasses import dataclass

from flows.forms.release_form import EndpointChoice
from flows.shared.errors import BadInput
from tasks.datasets import get_dataset
from tasks.deployments import get_deployment
from tasks.endpoints import NO_SUCH_ROUTE, get_canary_endpoint, list_canary_endpoints
from tasks.jobs import get_job, get_job_metrics
from tuneship.client import ApiError
from tuneship.contract.datasets import CONTENT_TAG
from tuneship.contract.endpoints import CanaryEndpoint
from tuneship.contract.jobs import Job
from tuneship.contract.models import job_of_model
from tuneship.gates.training.training_gates import ValidationMeasure, lowest_loss

BASELINE_NEEDED = (
    "endpoint.baseline_deployment_id: this server cannot list endpoints, so say what serves now"
)


@dataclass(frozen=True)
class Champion:
    """The deployment that serves an endpoint. `measured` is None for a base model, which has no training."""

    endpoint_id: str | None
    deployment_id: str
    model: str
    measured: ValidationMeasure | None
    # None where the service does not report it.
    compliance_mode: str | None = None

    def refuse_other_mode(self, wanted: str | None) -> None:
        """Raise `BadInput` for a release in another mode: all members of an endpoint share one."""
        if self.compliance_mode is not None and (wanted or "none") != self.compliance_mode:
            raise BadInput(
                f"security_settings.compliance_mode: what serves the endpoint has {self.compliance_mode}, which an "
                "endpoint keeps for its whole life; ask for the same, or name another endpoint"
            )


class SplitIsShared(Exception):
    """No deployment has 100 % of the endpoint: another rollout is shifting its traffic."""


def find_endpoint(endpoint: EndpointChoice) -> CanaryEndpoint | None:
    """Find the endpoint by id or name; None when there is none of that name yet.

    None also where a bare server cannot list or read endpoints; raises `BadInput` there unless the release names the
    deployment that serves now.
    """
    try:
        if endpoint.id is not None:
            return get_canary_endpoint(endpoint.id)
        page = list_canary_endpoints(str(endpoint.name))
    except ApiError as error:
        cannot_tell = error.status in NO_SUCH_ROUTE
        if cannot_tell and endpoint.baseline_deployment_id is not None:
            return None
        if cannot_tell and endpoint.id is None:
            raise BadInput(BASELINE_NEEDED) from None
        raise
    return next(iter(page.canary_endpoints), None)


def find_champion(endpoint: EndpointChoice) -> Champion | None:
    """Find the champion of an endpoint; None at the first release. Raises `SplitIsShared`."""
    existing = find_endpoint(endpoint)
    deployment_id = endpoint.baseline_deployment_id
    if deployment_id is None:
        if existing is None:
            return None
        alone = [one.id for one in existing.deployments if one.traffic_percentage == 100]
        if not alone:
            raise SplitIsShared("no deployment serves 100 % of the endpoint")
        deployment_id = alone[0]
    deployment = get_deployment(deployment_id)
    model = deployment.model_name
    return Champion(
        endpoint_id=existing.id if existing else endpoint.id,
        deployment_id=deployment_id,
        model=model,
        measured=_measured(model) if model.startswith("ft:") else None,
        compliance_mode=deployment.security_settings.get("compliance_mode"),
    )


def _measured(model: str) -> ValidationMeasure:
    """The champion's own training; None where its job is gone (404), so that it is not comparable."""
    base_model = model.split(":")[1]
    try:
        job = get_job(str(job_of_model(model)))
        losses = get_job_metrics(job.id).validation_loss
    except ApiError as error:
        if error.status != 404:
            raise
        return ValidationMeasure(base_model, None, None, None, model)
    return ValidationMeasure(
        base_model=job.base_model,
        validation_dataset_id=job.validation_dataset_id,
        content_sha256=validation_content(job),
        best_validation_loss=lowest_loss(losses),
        model=model,
    )


def validation_content(job: Job) -> str | None:
    """The content tag of a job's validation dataset; None where there is no dataset or no tag."""
    if job.validation_dataset_id is None:
        return None
    try:
        return get_dataset(job.validation_dataset_id).tags.get(CONTENT_TAG)
    except ApiError as error:
        if error.status != 404:
            raise
        return None
