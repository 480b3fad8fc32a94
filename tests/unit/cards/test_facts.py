"""Facts of a card come from the API's replies, without the texts that people write there."""

import pytest

from tuneship.cards.facts import dataset_facts, model_facts, privacy_facts, training_facts
from tuneship.contract.datasets import CONTENT_TAG, EXAMPLE_DATASET, EXAMPLE_TOKENS, Dataset
from tuneship.contract.declaring.examples import COMPLETED_JOB
from tuneship.contract.jobs import Job
from tuneship.contract.models import EXAMPLE_BASE, EXAMPLE_TUNED, Model

DIGEST = "a" * 64


def dataset(**tags: str) -> Dataset:
    whole = EXAMPLE_DATASET | {"token_distribution": EXAMPLE_TOKENS, "tags": tags}
    return Dataset.model_validate(whole | {"name": "Qname", "description": "Qdescription"})


@pytest.mark.parametrize(
    ("tag", "digest"), [(DIGEST, DIGEST), ("Qtext", None), (DIGEST + "Q", None)]
)
def test_a_dataset_has_no_name_and_a_tag_only_where_it_is_a_digest(
    tag: str, digest: str | None
) -> None:
    found = dataset_facts("training", "ds_1", dataset(**{CONTENT_TAG: tag, "site": "Qsite"}))
    assert found.sha256 == digest
    assert (found.examples, found.tokens) == (1500, 57_330)
    assert "Q" not in found.model_dump_json()


def test_a_dataset_that_is_gone_has_its_id_alone() -> None:
    found = dataset_facts("validation", "ds_1", None)
    assert found.model_dump(exclude_defaults=True) == {"role": "validation", "id": "ds_1"}


def test_a_training_has_the_numbers_of_its_job() -> None:
    job = Job.model_validate(COMPLETED_JOB)
    found = training_facts(job)
    assert (found.job_id, found.steps, found.hyperparameters) == (
        job.id,
        job.total_steps,
        job.hyperparameters,
    )
    assert found.validation_loss == job.validation_loss
    assert privacy_facts(job).compliance_mode == job.security_settings.get("compliance_mode")
    assert privacy_facts(None).formal_guarantee == "none"


def test_a_model_without_a_job_was_imported() -> None:
    tuned = Model.model_validate(EXAMPLE_TUNED)
    base = Model.model_validate(EXAMPLE_BASE | {"licence": "apache-2.0", "source": "org/model"})
    found = model_facts(tuned.name, base.id, tuned.id, tuned, base)
    assert (found.base_licence, found.base_source) == ("apache-2.0", "org/model")
    assert not found.is_imported
    elsewhere = tuned.model_copy(update={"fine_tuning_job_id": None})
    assert model_facts(tuned.name, base.id, tuned.id, elsewhere, None).is_imported
