"""The two distributions agree: one version, no file in both, and locks that hold the tested versions."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
LOCKED = sorted((ROOT / "packaging" / "locked").glob("*.txt"))
PIN = re.compile(r"^([a-z0-9._-]+)(?:\[[^]]*\])?==(\S+)", flags=re.MULTILINE | re.IGNORECASE)


def project(folder: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def wheel(folder: str) -> dict[str, Any]:
    return project(folder)["tool"]["hatch"]["build"]["targets"]["wheel"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_both_have_one_version() -> None:
    both = project(".")["project"]
    assert project("packaging/client")["project"]["version"] == both["version"]
    assert f"tuneship-client[cli]=={both['version']}" in both["dependencies"]
    assert f"-{both['version']}-" in (ROOT / "docs" / "installation.md").read_text()


def test_each_file_of_the_package_belongs_to_one_distribution() -> None:
    of_client = wheel("packaging/client")["hooks"]["custom"]["files"]
    assert {f"/{target}" for target in of_client.values()} == set(wheel(".")["exclude"])
    assert all(source == f"../../{target}" for source, target in of_client.items())


def test_tuneship_requires_what_the_client_requires_in_the_same_versions() -> None:
    client = project("packaging/client")["project"]
    ours = {*client["dependencies"], *client["optional-dependencies"]["cli"]}
    assert ours <= set(project(".")["project"]["dependencies"])


def test_every_module_of_the_client_and_its_command_imports_without_the_rest(
    tmp_path: Path,
) -> None:
    for source, target in wheel("packaging/client")["hooks"]["custom"]["files"].items():
        file = ROOT / "packaging" / "client" / source
        copy = shutil.copytree if file.is_dir() else shutil.copyfile
        (tmp_path / target).parent.mkdir(parents=True, exist_ok=True)
        copy(file, tmp_path / target)
    modules = [
        ".".join(file.relative_to(tmp_path).with_suffix("").parts)
        for file in tmp_path.rglob("*.py")
        if file.name != "frames.py"  # imported only when somebody asks for a pandas frame
    ]
    program = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    heavy = {"prefect", "pandas", "torch", "transformers", "sqlalchemy", "starlette", "flows"}
    assert heavy & set(json.loads(done.stdout)) == set()


# The documents count for one version of Python, since others take a package more or less.
COUNTED_FOR = {"python_version": "3.11", "python_full_version": "3.11.3"}


def packages_in(lock: str) -> set[str]:
    """Names of the packages that pip takes from a lock with the Python of `COUNTED_FOR`, on the tested platform."""
    lines = (ROOT / "packaging" / "locked" / f"{lock}.txt").read_text().splitlines()
    entries = [Requirement(line.rstrip("\\ ")) for line in lines if re.match("[a-z0-9]", line)]
    return {one.name for one in entries if one.marker is None or one.marker.evaluate(COUNTED_FOR)}


def test_the_documents_count_the_packages_of_the_locks() -> None:
    of_extras = {"psycopg", "psycopg-binary", "obstore"}
    assert of_extras < packages_in("service")
    counts = {
        "tuneship-client": len(packages_in("client")) + 1,
        "tuneship-client[cli]": len(packages_in("command")) + 1,
        "tuneship": len(packages_in("pipeline")) + 2,
        "tuneship[service]": len(packages_in("service") - of_extras) + 2,
        "tuneship[service,postgres,objects]": len(packages_in("service")) + 2,
    }
    text = (ROOT / "docs" / "installation.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| .* \| (\d+) \|$", text, flags=re.MULTILINE)
    assert {name: int(count) for name, count in rows} == counts
    decision = (ROOT / "docs" / "decisions" / "036-two-distributions.md").read_text()
    words = "client is {tuneship-client}\npackages, {tuneship-client[cli]} with the command, {tuneship} with"
    assert re.sub(r"\{(.*?)\}", lambda found: str(counts[found[1]]), words) in decision


@pytest.mark.parametrize("lock", LOCKED, ids=lambda file: file.stem)
def test_a_lock_has_the_tested_versions_with_hashes_and_no_place(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert not re.search(r"^-", text, flags=re.MULTILINE), "an option would be an order to pip"
    pins = dict(PIN.findall(text))
    assert text.count("--hash=sha256:") >= len(pins) > 10
    tested = {
        canonical(name): version
        for name, version in PIN.findall((ROOT / "constraints.txt").read_text())
    }
    other = {
        name: version
        for name, version in pins.items()
        if canonical(name) in tested and version.removesuffix("+cpu") != tested[canonical(name)]
    }
    assert other == {}


def test_the_lock_of_the_service_has_the_build_of_torch_for_processors() -> None:
    text = (ROOT / "packaging" / "locked" / "service.txt").read_text()
    assert re.search(r"^torch==\S+\+cpu ", text, flags=re.MULTILINE)
    assert not re.search(r"^(nvidia|cuda|triton)", text, flags=re.MULTILINE)
    assert "\ntorch==" not in (ROOT / "packaging" / "locked" / "pipeline.txt").read_text()
