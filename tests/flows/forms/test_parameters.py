"""Release parameters: the shipped examples are valid, mistakes are refused, and requests are built from them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid
from pydantic import ValidationError

from flows.forms.release_form import DIRECTORY, ReleaseParameters, TrainingData
from flows.forms.retrain_form import RetrainFile
from flows.release.data import resolve
from flows.retrain import retrain
from flows.script.main import load_parameters
from flows.shared.errors import BadInput
from flows.tune_and_deploy import tune_and_deploy
from tuneship.contract.deployments import DeploymentSecuritySettings
from tuneship.contract.jobs import Hyperparameters, JobSecuritySettings

EXAMPLES = Path(__file__).parents[3] / "examples"
SMALL: dict[str, Any] = {
    "model_name": "m",
    "endpoint": {"name": "shop"},
    "data": {"files": ["a.jsonl"]},
}


def release(**changes: Any) -> ReleaseParameters:
    return ReleaseParameters.model_validate_json(json.dumps(SMALL | changes))


def test_the_shipped_example_is_valid_and_names_files_that_exist() -> None:
    example = load_parameters(EXAMPLES / "release.yaml", ReleaseParameters)
    assert example.data is not None
    assert example.canary.traffic is not None
    files = [*example.data.files, example.data.validation_file, example.canary.traffic.prompts]
    assert [file for file in files if not Path(str(file)).is_file()] == []


def test_the_shipped_retraining_finds_its_files() -> None:
    example = load_parameters(EXAMPLES / "retrain.yaml", RetrainFile)
    assert example.release.data is not None
    found = resolve(example.release.data)
    assert [Path(file).name for file in found.files] == ["hospital_a.jsonl", "hospital_b.jsonl"]
    assert [one.lora_rank for one in example.release.settings] == [16, 32]


def test_a_pattern_stands_for_all_that_match_by_name_and_each_once(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        (tmp_path / name).write_text("{}")
    data = TrainingData(files=[f"{tmp_path}/*.jsonl", f"{tmp_path}/a.jsonl"])
    assert resolve(data).files == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]

    nothing = TrainingData(files=[f"{tmp_path}/*.csv"])
    assert resolve(nothing, may_be_empty=True).files == []
    with pytest.raises(BadInput, match="no file and no dataset matches"):
        resolve(nothing)


def test_paths_start_at_the_parameters_file(tmp_path: Path) -> None:
    for name in ("a.jsonl", "p.jsonl"):
        (tmp_path / name).write_text("{}\n")
    text = json.dumps(
        SMALL | {"canary": {"traffic": {"prompts": "p.jsonl", "requests_per_second": 1}}}
    )
    read = ReleaseParameters.model_validate_json(text, context={DIRECTORY: tmp_path})
    assert read.data is not None
    assert read.data.files == [f"{tmp_path}/a.jsonl"]
    assert read.canary.traffic is not None
    assert read.canary.traffic.prompts == f"{tmp_path}/p.jsonl"


def test_a_file_that_is_not_there_is_refused_with_the_parameters_file(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=r"a\.jsonl: no such file"):
        ReleaseParameters.model_validate_json(json.dumps(SMALL), context={DIRECTORY: tmp_path})


@pytest.mark.parametrize(
    "changes",
    [
        {"modell": "ft:x"},
        {"data": None},
        {"model": "ft:base:m:x"},
        {"data": {"files": []}},
        {"data": {"files": ["a.jsonl"], "validation_file": "v", "validation_dataset_id": "ds_1"}},
        {"endpoint": {}},
        {"endpoint": {"id": "cep_1", "name": "shop"}},
        {"hyperparameters": {"learning_rate": "fast"}},
        {"validation_frequency": 1.5},
        {"security_settings": {"compliance_mod": "hipaa"}},
        {"security_settings": {"compliance_mode": "HIPAA"}},
        {"security_settings": {"audit_logging": "true"}},
        {"canary": {"steps": [50, 25, 100]}},
        {"canary": {"alpha": float("inf")}},
    ],
)
def test_unknown_or_contradictory_parameters_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        release(**changes)


def test_every_problem_of_a_file_is_named_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "release.yaml"
    file.write_text("model_name: m\nendpoint: {nome: shop}\nhyperparameters: {epochs: many}\n")
    with pytest.raises(BadInput) as caught:
        load_parameters(file, ReleaseParameters)
    message = str(caught.value)
    assert "endpoint.nome" in message
    assert "hyperparameters.epochs" in message
    assert "many" not in message


@pytest.mark.parametrize("text", ["model_name: [", "- a\n- b\n", "\x00", "just text"])
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "release.yaml"
    file.write_text(text)
    with pytest.raises(BadInput):
        load_parameters(file, ReleaseParameters)


def test_a_missing_parameters_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be read"):
        load_parameters(tmp_path / "none.yaml", ReleaseParameters)


def test_the_digest_forgets_the_run_key_and_remembers_everything_else() -> None:
    assert release().digest() == release(run_key="again", force=True).digest()
    assert release().digest() != release(model_name="other").digest()


class LaterParameters(ReleaseParameters):
    """The release parameters of a later version of this package, with one more field."""

    patience: int = 5


def test_an_upgrade_between_a_kill_and_the_next_run_finds_the_same_record() -> None:
    fields = release(hyperparameters={"epochs": 2}).model_dump(exclude_unset=True)
    later = LaterParameters.model_validate(fields)
    assert later.digest() == ReleaseParameters.model_validate(fields).digest()
    assert later.digest() != LaterParameters.model_validate(fields | {"patience": 6}).digest()


def test_the_job_carries_what_the_form_says() -> None:
    wanted = release(hyperparameters={"epochs": 2}, validation_frequency=0.25)
    job = wanted.job("ds_1", None, wanted.settings[0])
    sent = job.model_dump(mode="json", exclude_unset=True)
    assert sent["hyperparameters"] == {"epochs": 2}
    assert sent["validation_frequency"] == 0.25


ASKED: dict[str, Any] = {
    "compliance_mode": "hipaa",
    "network_isolation": True,
    "encryption_level": "maximum",
    "audit_logging": True,
    "private_endpoints": True,
}


@pytest.mark.parametrize("settings", [{name: value} for name, value in ASKED.items()] + [ASKED])
def test_safeguards_are_sent_for_job_and_deployment_and_only_those_that_were_asked_for(
    settings: dict[str, Any],
) -> None:
    """A field that nobody asked for would contradict `compliance_mode: hipaa` if it were sent."""
    wanted = release(
        security_settings=dict.fromkeys(ASKED) | settings
    )  # as Prefect's form sends it
    job = wanted.job("ds_1", None, wanted.settings[0]).model_dump(exclude_unset=True)
    sent = wanted.deploy("tuneship-tiny", "1", {}).model_dump(exclude_unset=True)
    of_job = {name: value for name, value in settings.items() if name != "private_endpoints"}
    assert (job["security_settings"], sent["security_settings"]) == (of_job, settings)


def test_a_release_that_asks_for_no_safeguard_is_the_one_that_it_was_before_there_were_any() -> (
    None
):
    plain, empty = release(), release(security_settings=dict.fromkeys(ASKED))
    assert plain.digest() == empty.digest() != release(security_settings=ASKED).digest()
    for wanted in (plain, empty):
        job = wanted.job("ds_1", None, wanted.settings[0])
        assert "security_settings" not in job.model_dump(exclude_defaults=True)
        deploy = wanted.deploy("tuneship-tiny", "1", {})
        assert "security_settings" not in deploy.model_dump(exclude_defaults=True)


def test_the_form_explains_every_safeguard_of_the_service() -> None:
    models = ReleaseParameters.model_json_schema()["$defs"]
    fields = models["SecuritySettings"]["properties"]
    assert set(fields) == set(DeploymentSecuritySettings.model_fields)
    assert all(about["description"] for about in fields.values())
    assert set(fields) > set(JobSecuritySettings.model_fields)
    assert {name: about["default"] for name, about in fields.items()} == dict.fromkeys(fields)


def form() -> dict[str, Any]:
    """The definitions from which Prefect's UI builds the form of `tune-and-deploy`."""
    return parameter_schema(tune_and_deploy).model_dump()["definitions"]


def test_the_form_begins_with_what_a_person_must_say() -> None:
    models = form()
    fields = models["ReleaseParameters"]["properties"]
    first = sorted(fields, key=lambda name: fields[name]["position"])[:3]
    assert first == ["model_name", "data", "endpoint"]
    assert "default" not in fields["data"], "with a default of null it opens as `None`"
    assert "default" not in models["EndpointChoice"]["properties"]["name"]
    data = models["TrainingData"]["properties"]
    assert min(data, key=lambda name: data[name]["position"]) == "files"
    places = [about["position"] for about in fields.values()]
    assert sorted(places) == list(range(len(fields))), "every field has a place of its own"


def test_every_group_of_the_form_is_closed_and_named_for_what_it_decides() -> None:
    fields = form()["ReleaseParameters"]["properties"]
    groups = [name for name, about in fields.items() if "$ref" in str(about.get("anyOf"))]
    assert set(groups) == {*ReleaseParameters.GROUPS, "data"}
    for name in ReleaseParameters.GROUPS:
        about = fields[name]
        assert about["default"] is None
        assert about["anyOf"][0]["type"] == "null"
        assert name in about["title"]
        assert about["description"]


def test_a_group_that_stays_closed_keeps_its_defaults_and_the_digest() -> None:
    """The new form continues a release that was begun by a form of all defaults, or by a file."""
    closed = release(**dict.fromkeys(ReleaseParameters.GROUPS))
    filled_in = release(
        **{name: getattr(release(), name).model_dump() for name in ReleaseParameters.GROUPS}
    )
    assert closed == release()
    assert closed.digest() == release().digest() == filled_in.digest()
    assert closed.job("ds_1", None, closed.settings[0]) == release().job(
        "ds_1", None, release().settings[0]
    )


# Digests from before the form had groups: a release that was killed then must still be continued.
KNOWN_DIGESTS = {
    "small": "1e44acba44978b9367a07f6e2d4006f734981cf315d17b851911136cb910232e",
    "changed": "2b500ccde9146abc26d1fb03d2ebe5ed82607e489e6e43d6aba08d682d114989",
}


def test_digests_are_those_of_earlier_releases() -> None:
    changed = release(
        hyperparameters={"epochs": 2},
        canary={"steps": [50, 100]},
        deployment={"tags": {"a": "b"}},
        security_settings={"audit_logging": True},
    )
    assert {"small": release().digest(), "changed": changed.digest()} == KNOWN_DIGESTS


@pytest.mark.parametrize("name", ["release.yaml", "retrain.yaml"])
def test_parameters_of_a_saved_deployment_are_still_valid_for_the_server(name: str) -> None:
    """With `enforce_parameter_schema` the server checks the parameters before each run, spelled as in the files."""
    content = yaml.safe_load((EXAMPLES / name).read_text())
    parameters = content if name == "retrain.yaml" else {"release": content}
    whole = parameter_schema(retrain if name == "retrain.yaml" else tune_and_deploy).model_dump()
    assert is_valid(parameters, whole)
    parameters["release"] |= dict.fromkeys(ReleaseParameters.GROUPS)
    assert is_valid(parameters, whole)
    parameters["release"]["canary"] = {"stepz": []}
    assert not is_valid(parameters, whole)


def test_deployment_tags_belong_to_the_candidate_alone() -> None:
    settings = release(deployment={"tags": {"fault.error_rate": "0.2"}})
    assert settings.deploy("tuneship-tiny", "1", {}).tags == {}


def test_the_form_of_a_hyperparameter_set_knows_of_no_default() -> None:
    """Prefect's form sends every default that it knows, and a set would hide all of `hyperparameters`."""
    models = ReleaseParameters.model_json_schema()["$defs"]
    fields = models["HyperparameterSet"]["properties"]
    assert set(fields) == set(Hyperparameters.model_fields)
    assert not [name for name, about in fields.items() if "default" in about]
    assert models["Hyperparameters"]["properties"]["target_modules"]["default"] == ["all-linear"]


def test_a_set_changes_what_it_names_and_nothing_else() -> None:
    wanted = ReleaseParameters.model_validate(
        {
            "model_name": "a",
            "model": "ft:tuneship-tiny:a:b",
            "endpoint": {"name": "shop"},
            "hyperparameters": {"epochs": 2},
            "hyperparameter_sets": [{"lora_rank": 4}, {"lora_rank": 8}],
        }
    )
    assert [(one.epochs, one.lora_rank) for one in wanted.settings] == [(2, 4), (2, 8)]
