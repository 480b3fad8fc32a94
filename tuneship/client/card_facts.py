"""Reads from the service what a model card says about the origin of a model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from tuneship.cards.facts import dataset_facts, model_facts, privacy_facts, training_facts
from tuneship.client.clients import Client
from tuneship.contract.errors import ApiError
from tuneship.contract.model_card import CardDataset, CardModel, CardPrivacy, CardTraining

NOT_FOUND = 404
Found = TypeVar("Found")


@dataclass
class CardOrigin:
    """The sections of a card that the service knows."""

    model: CardModel
    data: list[CardDataset] = field(default_factory=list[CardDataset])
    training: CardTraining | None = None
    privacy: CardPrivacy = field(default_factory=CardPrivacy)


def origin_of(
    client: Client, name: str, base_model: str, model_id: str | None, job_id: str | None
) -> CardOrigin:
    """The origin of a model of this name; objects that are gone are left out. Raises errors of the client."""
    tuned = _found(client.models.get, model_id)
    job = _found(client.jobs.get, (tuned.fine_tuning_job_id if tuned else None) or job_id)
    origin = CardOrigin(
        model_facts(name, base_model, model_id, tuned, _found(client.models.get, base_model))
    )
    if job is None:
        return origin
    trained_on = _found(client.datasets.get, job.dataset_id)
    origin.data.append(dataset_facts("training", job.dataset_id, trained_on))
    if job.validation_dataset_id is not None:
        validated_on = _found(client.datasets.get, job.validation_dataset_id)
        origin.data.append(dataset_facts("validation", job.validation_dataset_id, validated_on))
    origin.training, origin.privacy = training_facts(job), privacy_facts(job)
    return origin


def _found(get: Callable[[str], Found], identifier: str | None) -> Found | None:
    """Read an object; None without an id, and for one that is gone."""
    try:
        return None if identifier is None else get(identifier)
    except ApiError as error:
        if error.status != NOT_FOUND:
            raise
        return None
