"""Instance types and regions are embedded or from an operator's file; those that are not here are refused."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.service.in_process import Service
from tuneship.agents.agent_starter import BaseOptions
from tuneship.agents.launchers import AgentSize
from tuneship.host import machine
from tuneship.replicas.engine_kinds import VllmServer
from tuneship.service.catalogues.base_models import SHIPPED, Catalogue, CatalogueFault
from tuneship.service.catalogues.instance_types import InstanceCatalogue
from tuneship.service.own_replicas import base_options

Start = Callable[..., Service]
GPU: dict[str, Any] = {"name": "two-gpus", "compute_type": "gpu", "gpus": 2}
CPU: dict[str, Any] = {"name": "small", "compute_type": "cpu"}
OFFERED: dict[str, Any] = {
    "regions": ["eu-1", "eu-2"],
    "instance_types": [
        {**CPU, "cpus": 1, "memory_gb": 0.001, "regions": ["eu-1"]},
        {"name": "huge", "compute_type": "cpu", "cpus": 4096, "node_labels": {"zone": "b"}},
        {"name": "vast", "compute_type": "cpu", "memory_gb": 1000000},
        GPU,
    ],
}


def written(folder: Path, content: object) -> Path:
    file = folder / "instances.yaml"
    file.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return file


@pytest.fixture
def service(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path / "gpus")
    return start(instance_catalogue=written(tmp_path, OFFERED))


def create(service: Service, **fields: str) -> tuple[int, str | None, str | None]:
    """Create a deployment with these fields, and return the status, the error code and the field it names."""
    body = {"model_name": "tuneship-tiny", "deployment_name": f"d{os.urandom(4).hex()}", **fields}
    answer = service.call("POST", "/v1/deployments", json=body)
    error: dict[str, Any] = answer.json().get("error", {})
    return answer.status_code, error.get("code"), error.get("param")


def test_an_operators_types_are_listed_behind_the_embedded_ones(service: Service) -> None:
    types = service.call("GET", "/v1/instance-types").json()["instance_types"]
    available = {one["name"]: one["available"] for one in types}
    assert available == {
        "local": True,
        "local-gpu": False,
        "small": True,
        "huge": False,
        "vast": False,
        "two-gpus": False,
    }
    assert (types[3]["cpus"], types[5]["gpus"], types[5]["compute_type"]) == (4096, 2, "gpu")


def test_an_absent_instance_type_is_unavailable_whether_it_is_known_or_not(
    service: Service,
) -> None:
    unavailable = (409, "instance_type_unavailable", "instance_type")
    assert create(service, instance_type="small", region="eu-1") == (201, None, None)
    assert create(service, region="eu-2") == (201, None, None)
    for name in ("huge", "vast", "two-gpus", "local-gpu"):
        assert create(service, instance_type=name, region="eu-1") == unavailable
    assert create(service, instance_type="small", region="eu-2") == unavailable
    assert create(service, instance_type="other") == unavailable
    assert create(service, region="eu-3") == (*unavailable[:2], "region")
    found = service.call("GET", "/v1/deployments?region=eu-1").json()["deployments"]
    assert [one["instance_type"] for one in found] == ["small"]


def test_a_gpu_makes_its_types_available_and_trains_but_our_engine_serves_on_cores(
    service: Service, tmp_path: Path
) -> None:
    for number in range(2):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
    types = service.call("GET", "/v1/instance-types").json()["instance_types"]
    assert {one["name"] for one in types if one["available"]} >= {"local-gpu", "two-gpus"}
    assert service.job(compute_config={"instance_type": "two-gpus"})
    for field, value in (("instance_type", "two-gpus"), ("compute_type", "gpu")):
        assert create(service, **{field: value}) == (409, "instance_type_unavailable", field)


def test_with_ray_a_training_may_be_larger_than_this_machine_and_a_replica_has_one_size(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path / "gpus")
    service = start(
        instance_catalogue=written(tmp_path, OFFERED),
        agents="ray",
        ray_urls=("http://127.0.0.1:1",),
        ray_token_file=tmp_path / "token",
        agent_cpus=3,
        agent_memory_bytes=2 << 30,
    )
    types = service.call("GET", "/v1/instance-types").json()["instance_types"]
    assert all(one["available"] for one in types)
    local = types[0]
    assert (local["compute_type"], local["cpus"], local["memory_gb"], local["gpus"]) == (
        "cpu",
        3,
        2,
        0,
    )
    for name in ("huge", "vast", "two-gpus", "local-gpu"):
        assert service.job(compute_config={"instance_type": name})
        error = (409, "instance_type_unavailable", "instance_type")
        assert create(service, instance_type=name, region="eu-1") == error
    assert create(service, instance_type="small", region="eu-1") == (201, None, None)


def test_the_replicas_of_a_base_model_have_the_size_of_the_type_that_its_entry_names(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "GPU_FOLDER", tmp_path / "gpus")
    for name in ("one", "two"):  # replicas are kept by the path of their model
        (tmp_path / name).symlink_to(SHIPPED / "tuneship-tiny", target_is_directory=True)
    models: list[dict[str, Any]] = [
        {"id": "one", "path": "one", "instance_type": "huge"},
        {
            "id": "two",
            "path": "two",
            "runtime": "vllm",
            "runtime_options": ["-x"],
            "instance_type": "two-gpus",
        },
    ]
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"models": models}))
    service = start(
        model_catalogue=file,
        instance_catalogue=written(tmp_path, OFFERED),
        agents="ray",
        ray_urls=("http://127.0.0.1:1",),
        ray_token_file=file,
        vllm_command=("vllm", "serve"),
    )
    for model, type_name in (("one", "huge"), ("two", "two-gpus"), ("two", "local")):
        assert create(service, model_name=model, instance_type=type_name) == (201, None, None)
    assert create(service, model_name="two", compute_type="gpu") == (201, None, None)
    for model, type_name in (("one", "two-gpus"), ("two", "huge"), ("tuneship-tiny", "huge")):
        status, code, _ = create(service, model_name=model, instance_type=type_name)
        assert (status, code) == (409, "instance_type_unavailable")
    options = partial(
        base_options,
        service.settings,
        (service.parts.catalogue, service.parts.instances),
    )
    assert options(tmp_path / "one") == BaseOptions(size=AgentSize(4096, 0, 0, {"zone": "b"}))
    server = VllmServer(("vllm", "serve"), ("-x",), service.settings.vllm_start_timeout_s)
    assert options(tmp_path / "two") == BaseOptions(vllm=server, size=AgentSize(1, 2, 0))
    assert options(SHIPPED / "tuneship-tiny") == BaseOptions(size=AgentSize(1, 0, 0))


def test_a_type_of_replicas_that_is_in_no_catalogue_keeps_the_service_from_starting(
    tmp_path: Path,
) -> None:
    entry = {"id": "one", "path": str(SHIPPED / "tuneship-tiny"), "instance_type": "other"}
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump({"models": [entry]}))
    (base,) = [one for one in Catalogue(file) if one.id == "one"]
    with pytest.raises(CatalogueFault, match="unknown instance_type: other"):
        InstanceCatalogue().of_replicas(base)


def test_without_a_file_there_is_this_machine() -> None:
    embedded = InstanceCatalogue()
    assert [one.name for one in embedded] == ["local", "local-gpu"]
    assert embedded.regions == ("local",)


def test_a_file_may_say_what_local_means(tmp_path: Path) -> None:
    own = {"name": "local", "compute_type": "cpu", "cpus": 2}
    catalogue = InstanceCatalogue(written(tmp_path, {"instance_types": [own]}))
    found = catalogue.get("local")
    assert found is not None
    assert (found.compute_type, found.cpus) == ("cpu", 2)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("[", "it cannot be read"),
        ("", "the file: "),
        ("- a", "the file: "),
        ({"instance_type": []}, "instance_type: Extra"),
        ({"instance_types": [{"name": "a"}]}, "instance_types[0].compute_type: Field required"),
        ({"instance_types": [CPU, {**CPU, "name": "a b"}]}, "instance_types[1].name: "),
        ({"instance_types": [{**CPU, "cpu": 2}]}, "instance_types[0].cpu: Extra"),
        ({"instance_types": [{**CPU, "cpus": "2"}]}, "instance_types[0].cpus: "),
        ({"instance_types": [{**CPU, "cpus": 0}]}, "instance_types[0].cpus: "),
        ({"instance_types": [{**CPU, "memory_gb": -1.0}]}, "instance_types[0].memory_gb: "),
        ({"instance_types": [{**CPU, "compute_type": "tpu"}]}, "instance_types[0].compute_type: "),
        ({"instance_types": [CPU, CPU]}, "instance_types[1] (small): the name is taken"),
        (
            {"instance_types": [{**CPU, "node_labels": {"a b": "c"}}]},
            "instance_types[0].node_labels.a b",
        ),
        (
            {"instance_types": [{**CPU, "node_labels": {"zone": "in(a,b)"}}]},
            "instance_types[0].node_labels.zone: ",
        ),
        ({"instance_types": [{**CPU, "gpus": 1}]}, "instance_types[0] (small).gpus: must be 0"),
        (
            {"instance_types": [{**GPU, "gpus": 0}]},
            "instance_types[0] (two-gpus).gpus: must be at least 1",
        ),
        (
            {"instance_types": [{**CPU, "regions": ["x"]}]},
            "instance_types[0] (small).regions: not listed above: x",
        ),
        ({"regions": ["a", "a"]}, "regions: a name is listed twice"),
        ({"regions": [1]}, "regions[0]: "),
    ],
)
def test_a_file_that_is_wrong_is_refused_with_the_place(
    tmp_path: Path, content: object, place: str
) -> None:
    file = written(tmp_path, content)
    with pytest.raises(CatalogueFault) as fault:
        InstanceCatalogue(file)
    assert str(fault.value).startswith(f"the file of instance types {file}: {place}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CatalogueFault, match=r"nowhere\.yaml: it cannot be read: FileNotFound"):
        InstanceCatalogue(tmp_path / "nowhere.yaml")
