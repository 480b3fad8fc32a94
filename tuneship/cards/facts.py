"""Reads the facts of a card from the API's replies. Names, descriptions and tags, which people write, are left out."""

import re
from typing import Literal

from tuneship.contract.datasets import CONTENT_TAG, Dataset
from tuneship.contract.jobs import Job
from tuneship.contract.model_card import CardDataset, CardModel, CardPrivacy, CardTraining
from tuneship.contract.models import Model

SHA256 = re.compile(r"[0-9a-f]{64}")


def model_facts(
    name: str,
    base_model: str,
    identifier: str | None,
    tuned: Model | None,
    base: Model | None,
) -> CardModel:
    """The model, as far as the service still knows it and its base model."""
    return CardModel(
        id=identifier,
        name=name,
        created_at=tuned.created_at if tuned else None,
        is_imported=tuned is not None and tuned.fine_tuning_job_id is None,
        base_model=base_model,
        base_source=base.source if base else None,
        base_licence=base.licence if base else None,
    )


def dataset_facts(
    role: Literal["training", "validation"], identifier: str, dataset: Dataset | None
) -> CardDataset:
    """A dataset of the training; None: it is gone."""
    if dataset is None:
        return CardDataset(role=role, id=identifier)
    digest = dataset.tags.get(CONTENT_TAG, "")
    return CardDataset(
        role=role,
        id=dataset.id,
        # Anybody may write a tag, and no text of it is passed on.
        sha256=digest if SHA256.fullmatch(digest) else None,
        examples=dataset.num_examples,
        tokens=dataset.total_tokens,
        parents=dataset.source_datasets or [],
    )


def training_facts(job: Job) -> CardTraining:
    """The training of a job."""
    place = job.compute_config.get("instance_type")
    return CardTraining(
        job_id=job.id,
        status=job.status,
        method=job.fine_tuning_method,
        hyperparameters=job.hyperparameters,
        steps=job.total_steps,
        started_at=job.started_at,
        ended_at=job.completed_at,
        training_loss=job.training_loss,
        validation_loss=job.validation_loss,
        ends_learnt=job.ends_learnt,
        devices=job.devices or [],
        instance_type=place if isinstance(place, str) else None,
    )


def privacy_facts(job: Job | None) -> CardPrivacy:
    """The safeguards of a job."""
    settings = job.security_settings if job else {}
    names = ("compliance_mode", "network_isolation", "encryption_level")
    return CardPrivacy.model_validate({name: settings.get(name) for name in names})
