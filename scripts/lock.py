"""Adds the packages that an installation takes to `constraints.txt`, where they have no line yet; existing lines stay.

Then uv writes `packaging/locked/`: the same versions with hashes of their files, for `pip install --require-hashes`.
Run `make lock` after a change of the dependencies in a `pyproject.toml`. To change a version, change or remove its line
first.

torch is in locks of its own, one for each of its builds: the CPU build comes from a place that not every machine has.
All other locks hold for every platform and version of Python that is supported. `oldest.txt`, for `make oldest`, has
the lowest versions that the two project files allow, with the newest versions of what these need.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from ast import literal_eval
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "constraints.txt"
LOCKED = ROOT / "packaging" / "locked"
OWN = ("tuneship", "tuneship-client")
# The project file of each lock, and its extras.
LOCKS = {
    "client": ("packaging/client",),
    "command": ("packaging/client", "cli"),
    "pipeline": (".",),
    "service": (".", "service", "postgres", "objects"),
    "gguf": (".", "service", "gguf"),
    "node": (".", "node"),
    "cluster": (".", "cluster"),
    "development": (".", "dev"),
    "docs": (".", "docs"),
}
# They hold only what these do not, and are installed together with them.
MORE = {
    "gguf": ("service",),
    "node": ("service",),
    "cluster": ("service", "node"),
    "development": ("service",),
    "docs": ("service",),
}
# The lock of the lowest versions that are allowed, with what its tests use; it stands alone.
OLDEST = "oldest"
OLDEST_EXTRAS = ("service", "postgres", "objects", "parquet", "otel", "evaluation", "gguf")
# The lock of what builds both distributions: without it, pip would download the newest build backend.
BUILD = "build"
# The builds of torch, with what each needs: one version of Python on Linux, x86-64.
TORCH = {"torch-cpu": "+cpu", "torch-cuda": ""}
TORCH_PLATFORM = ("--python-platform", "x86_64-manylinux_2_28")
WITH_EXTRAS = re.compile(r"^([a-z0-9-]+)\[[^]]+\](==.*\n(?: +--hash=.*\n)+)", flags=re.MULTILINE)
ENTRY = re.compile(r"^[a-z0-9].*\n(?: +.*\n)+", flags=re.MULTILINE)
EDITABLE = ("-e", "packaging/client", "-e", ".[dev,cluster,docs]")


def canonical(name: str) -> str:
    """The normal form of a package name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolved() -> dict[str, str]:
    """The versions that pip would install into an empty environment under the existing lines, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, "-c", str(LOCK), *EDITABLE],
            cwd=ROOT,
            check=True,
        )
        items = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in items}


def places_of_wheels() -> list[str]:
    """The places beside the index where pip looks for wheels, as uv's options: torch's CPU build is in one of them."""
    done = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    )
    lines = (line.partition("=") for line in done.stdout.splitlines())
    # Each value is written as Python writes a text, and several places stand on lines of their own.
    values = [literal_eval(value) for name, _, value in lines if name.endswith(".find-links")]
    found = dict.fromkeys(place for value in values for place in value.split())
    return [option for place in found for option in ("--find-links", place)]


def compiled(source: str, *options: str, torch: str, constraints: str = LOCK.name) -> str:
    """Compile one lock with uv. `source`: a project file, or requirements one a line; `torch`: the version it takes."""
    fixed = f"-c {constraints} --generate-hashes --no-strip-extras --no-annotate --python-version 3.11 --quiet"
    own = ["--no-emit-package", "tuneship-client", "--custom-compile-command", "make lock"]
    with tempfile.TemporaryDirectory() as folder:
        wanted, chosen = Path(folder) / "wanted.in", Path(folder) / "torch.txt"
        wanted.write_text(source)
        # uv would choose the build with GPU libraries for some platforms, and lock these too.
        chosen.write_text(f"torch=={torch}\n")
        file = source if source.endswith(".toml") else str(wanted)
        compiling = [sys.executable, *["-m", "uv", "pip", "compile"], file, *fixed.split(), *own]
        done = subprocess.run(
            [*compiling, *options, "--overrides", str(chosen)],
            cwd=ROOT,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
    # Up to version 23.2, pip asks for version and hashes of `name[extra]` and of `name` apart.
    return WITH_EXTRAS.sub(r"\1\2\g<0>", done.stdout)


def locks() -> dict[str, str]:
    """Compile every lock; the texts by name."""
    (torch,) = re.findall(r"^torch==(.+)$", LOCK.read_text(), flags=re.MULTILINE)
    places = places_of_wheels()
    made = {
        name: compiled(
            f"torch=={torch}{build}",
            *TORCH_PLATFORM,
            *(places if build else ()),
            torch=torch + build,
        )
        for name, build in TORCH.items()
    }
    everywhere = ("--universal", *places, "--no-emit-package", "torch")
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    made[BUILD] = compiled("\n".join(needed), *everywhere, torch=f"{torch}+cpu")
    for name, (project, *extras) in LOCKS.items():
        options = [part for extra in extras for part in ("--extra", extra)]
        made[name] = compiled(
            f"{project}/pyproject.toml", *options, *everywhere, torch=f"{torch}+cpu"
        )
    extras = [part for extra in OLDEST_EXTRAS for part in ("--extra", extra)]
    lowest = [*extras, "--group", OLDEST]
    lowest += ["--resolution", "lowest-direct", "--fork-strategy", "fewest"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as build:
        # Both are installed together.
        build.write(made[BUILD])
        build.flush()
        made[OLDEST] = compiled(
            "./pyproject.toml", *lowest, *everywhere, torch=f"{torch}+cpu", constraints=build.name
        )
    return made | {
        name: _without(made[name], [made[base] for base in bases]) for name, bases in MORE.items()
    }


def _without(lock: str, others: Sequence[str]) -> str:
    known = {entry.partition("\n")[0] for other in others for entry in ENTRY.findall(other)}
    return ENTRY.sub(lambda entry: "" if entry[0].partition("\n")[0] in known else entry[0], lock)


def main() -> None:
    """Rewrite the file: its comments first, then the lines sorted by name; then the locks."""
    lines = LOCK.read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    pins = [line for line in lines if line and not line.startswith("#")]
    named = {canonical(line.partition("==")[0]) for line in pins}
    added = [
        f"{name}=={version}"
        for name, version in resolved().items()
        if canonical(name) not in named and canonical(name) not in OWN
    ]
    before = LOCK.read_text()
    LOCK.write_text("\n".join([*head, *sorted([*pins, *added], key=str.lower)]) + "\n")
    try:
        made = locks()  # uv reads the new lines
    except BaseException:
        LOCK.write_text(before)
        raise
    for name, text in made.items():
        (LOCKED / f"{name}.txt").write_text(text)
    sys.stdout.write(f"{LOCK.name}: {len(pins)} lines kept, added: {', '.join(added) or 'none'}\n")


if __name__ == "__main__":
    main()
