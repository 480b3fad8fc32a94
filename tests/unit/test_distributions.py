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
from packaging.version import Version

from scripts.lock import OLDEST_EXTRAS

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
    of_service = packages_in("service") | packages_in("torch-cpu")
    assert of_extras < of_service
    counts = {
        "tuneship-client": len(packages_in("client")) + 1,
        "tuneship-client[cli]": len(packages_in("command")) + 1,
        "tuneship": len(packages_in("pipeline")) + 2,
        "tuneship[service]": len(of_service - of_extras) + 2,
        "tuneship[service,postgres,objects]": len(of_service) + 2,
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
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert all(" --hash=sha256:" in entry for entry in entries)
    tested = {
        canonical(name): version
        for name, version in PIN.findall((ROOT / "constraints.txt").read_text())
    }
    other = {
        name: version
        for name, version in pins.items()
        if canonical(name) in tested and version.removesuffix("+cpu") != tested[canonical(name)]
    }
    # This one has the lowest versions that are allowed.
    assert bool(other) == (lock.stem == "oldest")


@pytest.mark.parametrize("folder", [".", "packaging/client"])
def test_every_lower_bound_is_a_version_that_make_oldest_tries(folder: str) -> None:
    """An extra that is not tried there is for a program of its own: a tracker, Ray, a site."""
    tried = dict(PIN.findall((ROOT / "packaging" / "locked" / "oldest.txt").read_text()))
    metadata = project(folder)["project"]
    extras = metadata["optional-dependencies"]
    listed = [text for extra in {*OLDEST_EXTRAS, "cli"} & {*extras} for text in extras[extra]]
    bounds = dict[str, str]()
    for wanted in map(Requirement, [*metadata["dependencies"], *listed]):
        for one in wanted.specifier:
            if one.operator == ">=":
                bounds[canonical(wanted.name)] = one.version
    # No processor's build of its lowest version is to be had where this is written; that one was tried on a GPU.
    bounds.pop("torch", None)
    assert len(bounds) > 5
    assert {name: Version(tried[name]) for name in bounds} == {
        name: Version(version) for name, version in bounds.items()
    }


def test_torch_and_libraries_for_gpus_are_in_no_lock_but_that_of_their_build() -> None:
    for lock in LOCKED:
        has_torch = re.search(r"^torch==(\S+)", lock.read_text(), flags=re.MULTILINE)
        assert bool(has_torch) == lock.stem.startswith("torch-"), lock
        has_libraries = re.search(r"^(nvidia|cuda|triton)", lock.read_text(), flags=re.MULTILINE)
        assert bool(has_libraries) == (lock.stem == "torch-cuda"), lock
    cpu = (ROOT / "packaging" / "locked" / "torch-cpu.txt").read_text()
    assert re.search(r"^torch==\S+\+cpu ", cpu, flags=re.MULTILINE)


def test_make_installs_nothing_that_has_no_hash_but_torch() -> None:
    """Each stamp is an environment; `make lock` writes the locks that its recipe reads."""
    makefile = (ROOT / "Makefile").read_text()
    values = dict(re.findall(r"^([A-Z]+) = (.*)$", makefile, flags=re.MULTILINE))
    assert " --require-hashes --no-deps --only-binary :all: " in values["BUILDS"]
    assert values["LOCKED"].startswith("$(BUILDS) -r ")
    assert " --no-deps --no-build-isolation " in values["OWN"]
    assert values["TORCH"] == "$(PIP) -c constraints.txt torch"
    assert makefile.count("$(PIP)") == 3
    assert makefile.count("pip install") == 1
    named = re.findall(r"-r packaging/locked/([a-z-]+)\.txt", makefile)
    assert {"service", "build", "gguf", "node", "cluster", "docs", "development", "oldest"} == set(
        named
    )
    assert set(named) <= {lock.stem for lock in LOCKED}


@pytest.mark.parametrize(
    ("extra", "locks"),
    [
        ("service", {"service"}),
        ("gguf", {"service", "gguf"}),
        ("node", {"service", "node"}),
        ("cluster", {"service", "node", "cluster"}),
        ("dev", {"service", "development"}),
    ],
)
def test_the_locks_that_make_installs_have_whatever_an_extra_names(
    extra: str, locks: set[str]
) -> None:
    have = set[str]().union(*(packages_in(lock) for lock in locks))
    extras = project(".")["project"]["optional-dependencies"]

    def named(text: str) -> set[str]:
        wanted = Requirement(text)
        if wanted.name == "tuneship":
            return {name for one in wanted.extras for text in extras[one] for name in named(text)}
        return {canonical(wanted.name)}

    wanted = {name for text in extras[extra] for name in named(text)}
    assert wanted - {canonical(name) for name in have} - {"torch"} == set()
