"""API profiles: an answer has the fields of the full shape (§2.1, §2.3, §2.4), of the short one (§4.9), or of both.

Handlers always make the superset (`auto`); a strict profile keeps exactly the fields of its reference. The lists of
the short one have no pages, so they hold a thousand entries, the newest, unless the caller asks for a page. Pure.
The profile comes from the header `X-API-Profile`, else from the client's setting, else from the service's. Replays of
an `Idempotency-Key` keep the body that was sent first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from tuneship.contract.errors import InvalidRequestError
from tuneship.settings import ApiProfile, ApiSettings

HEADER = "X-API-Profile"
PROFILES: tuple[ApiProfile, ...] = get_args(ApiProfile)


@dataclass(frozen=True)
class Shape:
    """The fields of an answer; for a list, those of each entry of `items`."""

    fields: frozenset[str]
    items: str = ""
    is_paged: bool = True
    # The reference has no null: a field without a value is left out.
    omits_null: bool = False

    def of(self, reply: Mapping[str, Any]) -> dict[str, Any]:
        """The answer with these fields only."""
        if not self.items:
            return self._kept(reply)
        shaped: dict[str, Any] = {self.items: [self._kept(entry) for entry in reply[self.items]]}
        return shaped | ({"pagination": reply["pagination"]} if self.is_paged else {})

    def _kept(self, record: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in record.items()
            if name in self.fields and not (self.omits_null and value is None)
        }


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


LISTED = _names(
    "id model_name deployment_name status endpoint created_at updated_at compute_type instance_type tags"
)
UPDATED = LISTED | _names("min_replicas max_replicas auto_scaling model_config")
CREATED = LISTED | _names("min_replicas max_replicas auto_scaling region")
RECORD = CREATED | _names("current_replicas model_config security_settings")
SHORT = _names("deployment_id status model_id deployment_name created_at")
SHORT_RECORD = SHORT | _names(
    "endpoint compute_type instance_type min_replicas max_replicas current_replicas auto_scaling updated_at tags"
)
TUNED = _names("id base_model name fine_tuning_job_id created_at fine_tuning_method tags")
JOB = _names(
    "id base_model dataset_id validation_dataset_id fine_tuning_method model_name status created_at updated_at "
    "validation_frequency hyperparameters compute_config tags fine_tuned_model started_at completed_at current_epoch "
    "total_epochs current_step total_steps training_loss validation_loss"
)
AVAILABLE = _names("id name version description parameters context_length supported_fine_tuning")

SHAPES: Mapping[ApiProfile, Mapping[str, Shape]] = {
    "auto": {},
    "full": {
        "create_deployment": Shape(CREATED),
        "get_deployment": Shape(RECORD),
        "list_deployments": Shape(LISTED, "deployments"),
        "update_deployment": Shape(UPDATED),
        "delete_deployment": Shape(_names("id status")),
        "get_job": Shape(JOB),
        "list_models": Shape(TUNED, "models", omits_null=True),
        "get_model": Shape(TUNED, omits_null=True),
    },
    "simplified": {
        "create_deployment": Shape(SHORT),
        "get_deployment": Shape(SHORT_RECORD),
        "list_deployments": Shape(SHORT, "deployments", is_paged=False),
        "update_deployment": Shape(SHORT_RECORD),  # §4.9 has no update: the fields of its record
        "delete_deployment": Shape(_names("deployment_id status")),
        "get_job": Shape(JOB),
        "list_models": Shape(AVAILABLE, "models", is_paged=False, omits_null=True),
        "get_model": Shape(AVAILABLE, omits_null=True),
    },
}


def chosen(sent: Sequence[str], client_id: str, settings: ApiSettings) -> ApiProfile:
    """The profile of one request; `sent` are the values of its header. Raises `InvalidRequestError`."""
    if not sent:
        return settings.client_profiles.get(client_id, settings.api_profile)
    for profile in PROFILES:
        if list(sent) == [profile]:
            return profile
    raise InvalidRequestError(f"{HEADER} must be one of {', '.join(PROFILES)}")


def shaped(operation: str, profile: ApiProfile, reply: Mapping[str, Any]) -> Mapping[str, Any]:
    """The reply of the named operation in a profile."""
    shape = SHAPES[profile].get(operation)
    return reply if shape is None else shape.of(reply)
