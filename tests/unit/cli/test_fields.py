"""A text on the command line becomes the value of a field, and which mistakes are named."""

from typing import Any

import pytest
from pydantic import BaseModel

from tuneship.cli.fields import BadField, kind_of, set_field, value_of, wire_names
from tuneship.cli.parameters import body_of
from tuneship.contract.deployments import DeploymentCreate, DeploymentUpdate
from tuneship.contract.endpoints import CanaryEndpointCreate
from tuneship.contract.generation import Generate
from tuneship.contract.jobs import JobCreate
from tuneship.contract.models import ModelImport
from tuneship.contract.webhooks import WebhookCreate

JOB = {"base_model": "tuneship-tiny", "dataset_id": "ds_1", "model_name": "7"}


def body(model: type[BaseModel], *assignments: str, **options: Any) -> dict[str, Any]:
    made = body_of(model, {**options, "set_fields": list(assignments)})
    return made.model_dump(mode="json", by_alias=True, exclude_unset=True)


def test_a_text_stays_a_text_and_a_number_becomes_one() -> None:
    made = body(JobCreate, **JOB, validation_frequency="5", tags=["year=2026", "empty="])
    assert made == {**JOB, "validation_frequency": 5, "tags": {"year": "2026", "empty": ""}}


@pytest.mark.parametrize(
    ("assignment", "place", "value"),
    [
        ("hyperparameters.epochs=3", "hyperparameters", {"epochs": 3}),
        ("hyperparameters.epochs=auto", "hyperparameters", {"epochs": "auto"}),
        ('hyperparameters.target_modules=["q_proj"]', "hyperparameters", {"target_modules": ["q_proj"]}),
        ("hyperparameters.target_modules.0=q_proj", "hyperparameters", {"target_modules": ["q_proj"]}),
        ("tags.year=2026", "tags", {"year": "2026"}),
        ("tags.2026=x", "tags", {"2026": "x"}),
        ("tags.none=null", "tags", {"none": "null"}),
        ("security_settings.audit_logging=true", "security_settings", {"audit_logging": True}),
        ("model_name=a=b", "model_name", None),
    ],
)  # fmt: skip
def test_a_path_reaches_every_field(assignment: str, place: str, value: Any) -> None:
    content: dict[str, Any] = {}
    set_field(content, JobCreate, assignment)
    assert content == {place: "a=b" if value is None else value}


def test_null_resets_what_may_be_null() -> None:
    made = body(DeploymentUpdate, "tags.team=null", "model_config.default_top_p=null")
    assert made == {"tags": {"team": None}, "model_config": {"default_top_p": None}}


def test_a_list_of_members_is_written_entry_by_entry() -> None:
    made = body(
        CanaryEndpointCreate,
        "deployments.0.id=dep_1",
        "deployments.0.traffic_percentage=90",
        "deployments.1.id=dep_2",
        "deployments.1.traffic_percentage=10",
        name="c",
    )
    assert [one["traffic_percentage"] for one in made["deployments"]] == [90, 10]


@pytest.mark.parametrize(
    ("model", "assignments", "options", "says"),
    [
        (JobCreate, ["hyperparameters.epochs=few"], JOB, "hyperparameters.epochs: "),
        (JobCreate, ["hyperparameters.epoch=3"], JOB, "epoch: is not a known key (did you mean epochs?)"),
        (JobCreate, ["hyperparameters=3"], JOB, "hyperparameters: "),
        (JobCreate, ["hyperparameters.seed.x=3"], JOB, "hyperparameters.seed: "),
        (JobCreate, [], {"base_model": "b"}, "dataset_id: is needed; model_name: is needed"),
        (JobCreate, ["epochs"], JOB, "--set: write it as key=value"),
        (JobCreate, ["=3"], JOB, "--set: write it as key=value"),
        (JobCreate, ["a..b=3"], JOB, "--set: write a path as"),
        (JobCreate, [".".join("a" * 40) + "=3"], JOB, "--set: write a path as"),
        (JobCreate, [], {**JOB, "tags": ["secret"]}, "--tags: write it as key=value"),
        (JobCreate, [], {**JOB, "fine_tuning_method": "dpo"}, "fine_tuning_method: must be lora"),
        (JobCreate, ["tags.3.x=3"], JOB, "tags.3: "),
        (WebhookCreate, ["events.x=*"], {"url": "u"}, "--set: the entries of a list are numbered"),
        (WebhookCreate, ["events.2=*"], {"url": "u"}, "--set: the entries of a list are numbered from 0"),
        (Generate, [], {}, "prompt: is needed"),
        (Generate, [], {"prompt": ""}, "prompt: must not be empty"),
        (ModelImport, [], {"name": "a b"}, "name: must match ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"),
        (Generate, ["messages.0.role=user", "messages.0.content=a"], {"prompt": "secret"}, "messages: must not be"),
        (Generate, ["temperature=NaN"], {"prompt": "secret"}, "temperature: "),
        (DeploymentCreate, ["model_config.x=secret"], {"model_name": "m"}, "model_config.x: is not a known key"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_by_its_field_and_not_by_its_value(
    model: type[BaseModel], assignments: list[str], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(BadField) as refused:
        body(model, *assignments, **options)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


def test_the_kind_of_every_field_of_a_job() -> None:
    kinds = {name: str(kind_of(hint)) for name, (_, hint) in wire_names(JobCreate).items()}
    deep = {"hyperparameters", "compute_config", "security_settings", "comparison"}
    assert {name for name, kind in kinds.items() if kind == "deep"} == deep
    assert kinds["tags"] == "pairs"
    assert value_of(str, "3") == "3"
