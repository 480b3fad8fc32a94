"""The images, the chart and the compose file for a cluster are right as far as programs without a cluster can tell."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError

from tests.support.service.processes import ROOT
from tuneship.settings import ServiceSettings

IMAGE, COMPOSE = (
    ROOT / "deployments" / "image" / "Dockerfile",
    ROOT / "deployments" / "compose.yaml",
)
CHART = ROOT / "deployments" / "kubernetes" / "tuneship"
OLDEST, NEWEST = "1.28", "1.37"
LEAST: dict[str, Any] = {
    "publicUrl": "https://tuneship.example.org",
    "images": {
        "service": "registry.example.org/tuneship:1",
        "node": "registry.example.org/tuneship-node:1",
    },
    "bucket": {"url": "s3://bucket/prefix"},
}
ALL: dict[str, Any] = LEAST | {
    "trustedProxies": ["10.0.0.0/8"],
    "serviceAccount": "tuneship",
    "secrets": {"bucketCredentials": "bucket"},
    "bucket": {"url": "s3://bucket/prefix", "endpoint": "https://s3.example.org", "region": "eu-1"},
    "models": {"claim": "models", "catalogue": "models: []\n", "instanceTypes": "regions: [eu-1]\n"},
    "images": LEAST["images"] | {"pullSecrets": ["registry"]},
    "services": {"environment": {"TUNESHIP_MAXIMUM_WEBHOOKS": "30"}},
    "ray": {
        "head": {"redisAddress": "redis:6379"},
        "nodes": {"nodeSelector": {"disk": "fast"}, "tolerations": [{"key": "gpu", "operator": "Exists"}]},
        "moreNodes": [
            {
                "name": "gpus",
                "replicas": 1,
                "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}},
                "labels": {"zone": "b"},
                "image": "registry.example.org/tuneship-node-vllm:1",
            }
        ],
    },
    "ingressFrom": [{"namespaceSelector": {"matchLabels": {"name": "ingress"}}}],
}  # fmt: skip


def rendered(values: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for text in Chart.load(CHART).render(dict(values), name="trial", namespace="clinic").values():
        yield from filter(None, yaml.safe_load_all(text))


def pod_templates(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    spec = found.get("spec", {})
    if found["kind"] == "RayCluster":
        return [
            spec["headGroupSpec"]["template"],
            *(one["template"] for one in spec["workerGroupSpecs"]),
        ]
    return [spec["template"]] if "template" in spec else []


@pytest.mark.parametrize("values", [LEAST, ALL], ids=["least", "all"])
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_kubernetes_accepts_what_the_chart_renders(values: dict[str, Any], version: str) -> None:
    kinds = set[str]()
    for found in rendered(values):
        kinds.add(found["kind"])
        if (
            found["kind"] != "RayCluster"
        ):  # KubeRay's own kind, of whose parts the pods are Kubernetes's
            kubernetes_validate.validate(found, version, strict=True)
        for template in pod_templates(found):
            holder = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
            kubernetes_validate.validate(holder | {"template": template}, version, strict=True)
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "RayCluster"} <= kinds


def test_groups_of_nodes_differ_in_what_they_say() -> None:
    (cluster,) = (one for one in rendered(ALL) if one["kind"] == "RayCluster")
    nodes, gpus = cluster["spec"]["workerGroupSpecs"]
    assert (nodes["groupName"], nodes["replicas"], gpus["groupName"]) == ("nodes", 2, "gpus")
    assert "labels" not in nodes
    assert gpus["labels"] == {"zone": "b"}
    (first,), (second,) = (one["template"]["spec"]["containers"] for one in (nodes, gpus))
    assert first["image"] != second["image"]
    assert second["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert nodes["template"]["spec"]["nodeSelector"] == {"disk": "fast"}
    assert "nodeSelector" not in gpus["template"]["spec"]


def test_a_misspelt_field_would_be_found() -> None:
    (deployment,) = (one for one in rendered(LEAST) if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["livenessProbe"]["periodSecond"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, NEWEST, strict=True)


def test_helm_finds_no_fault() -> None:
    report = lint(CHART, ALL, strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize(
    ("missing", "named"),
    [("publicUrl", "/publicUrl"), ("images", "/images"), ("bucket", "/bucket/url")],
)
def test_a_value_that_must_be_set_is_named(missing: str, named: str) -> None:
    values = {name: value for name, value in LEAST.items() if name != missing}
    with pytest.raises(HelmError, match=named):
        list(rendered(values))


@pytest.mark.parametrize("values", [LEAST, ALL], ids=["least", "all"])
def test_no_pod_has_rights_or_holds_a_secret_in_its_description(values: dict[str, Any]) -> None:
    for template in (template for found in rendered(values) for template in pod_templates(found)):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        for container in pod["containers"]:
            assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            secret = [
                one
                for one in container["env"]
                if re.search("TOKEN$|DATABASE_URL|SECRET", one["name"])
            ]
            assert secret
            assert all("value" not in one for one in secret)


def test_the_first_process_of_every_node_reaps() -> None:
    (cluster,) = (one for one in rendered(LEAST) if one["kind"] == "RayCluster")
    assert all(one["spec"]["shareProcessNamespace"] for one in pod_templates(cluster))


def known(names: Iterator[str]) -> bool:
    ours = {
        name.removeprefix("TUNESHIP_").lower() for name in names if name.startswith("TUNESHIP_")
    }
    return bool(ours) and ours <= set(ServiceSettings.model_fields)


def test_every_setting_in_the_chart_and_the_compose_file_exists() -> None:
    (deployment,) = (one for one in rendered(ALL) if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert known(one["name"] for one in container["env"])
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    assert known(iter(services["service-1"]["environment"]))


def test_the_compose_file_builds_targets_and_mounts_secrets_that_exist() -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    # A file of this repository would be copied into the images.
    assert all(one["file"].startswith("${") for one in compose["secrets"].values())
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", IMAGE.read_text(), flags=re.MULTILINE))
    built = [one["build"] for one in compose["services"].values() if "build" in one]
    assert {one["target"] for one in built} == {"service", "node"} <= targets
    for build in built:
        assert (COMPOSE.parent / build["context"] / build["dockerfile"]).resolve() == IMAGE
    for service in compose["services"].values():
        assert set(service.get("secrets", [])) <= set(compose["secrets"])
        assert {one["source"] for one in service.get("configs", [])} <= set(compose["configs"])
        assert set(service.get("depends_on", [])) <= set(compose["services"])


def test_the_image_installs_what_has_a_hash_and_our_own_source_alone() -> None:
    text = IMAGE.read_text().replace("\\\n", " ")
    assert "PIP_REQUIRE_HASHES=1 PIP_ONLY_BINARY=:all: PIP_NO_DEPS=1" in text
    asked = re.findall(r"(\S+ )?/opt/pip/bin/pip (.*?)(?= +&&|\n)", text)
    without_hash = "PIP_REQUIRE_HASHES=0 "
    locked = [arguments for before, arguments in asked if before != without_hash]
    assert [arguments for before, arguments in asked if before == without_hash] == [
        "wheel --no-build-isolation --wheel-dir /own ./packaging/client .",
        "--python /opt/tuneship/bin/python install /own/*.whl",
    ]
    names = re.findall(r"-r \"?packaging/locked/(\S+?)\.txt", text)
    assert names == ["build", "service", "${TORCH}", "node"]
    assert len(locked) == len(names) == len(asked) - 2
    assert all(re.fullmatch(r".*install -r \S+", arguments) for arguments in locked)
    (torch,) = re.findall(r"^ARG TORCH=(.+)$", text, flags=re.MULTILINE)
    for name in (torch, "torch-cpu", "service", "build", "node"):
        assert (ROOT / "packaging" / "locked" / f"{name}.txt").is_file()


def test_every_stage_of_the_image_begins_with_the_one_base_image_that_can_be_pinned() -> None:
    bases = re.findall(r"^FROM (\S+) AS (\S+)$", IMAGE.read_text(), flags=re.MULTILINE)
    stages = {name for _, name in bases}
    assert {base for base, _ in bases} - stages == {"${DEBIAN_IMAGE}", "scratch"}


def test_the_image_copies_what_exists_and_hadolint_finds_no_fault() -> None:
    for line in re.findall(r"^COPY (?!--from)(.+)$", IMAGE.read_text(), flags=re.MULTILINE):
        *sources, _ = line.split()
        assert all((ROOT / source).exists() for source in sources)
    program = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert program is not None
    done = subprocess.run([program, str(IMAGE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
