"""Adds the packages that `.[dev]` installs to `constraints.txt`, where they have no line yet; existing lines stay.

Then uv writes `packaging/locked/`: the same versions with hashes of their files, for `pip install --require-hashes`.
Run `make lock` after a change of the dependencies in a `pyproject.toml`. To change a version, change or remove its line
first.
"""

import json
import re
import subprocess
import sys
import tempfile
from ast import literal_eval
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "constraints.txt"
LOCKED = ROOT / "packaging" / "locked"
OWN = ("tuneship", "tuneship-client")
EXTRAS = ("--extra", "service", "--extra", "postgres", "--extra", "objects")
# What each lock is compiled from. torch has a CPU build for one platform and version of Python here, so the lock of
# the service holds for these alone.
LOCKS = {
    "client.txt": ("packaging/client/pyproject.toml", "--universal"),
    "command.txt": ("packaging/client/pyproject.toml", "--extra", "cli", "--universal"),
    "pipeline.txt": ("pyproject.toml", "--universal"),
    "service.txt": ("pyproject.toml", *EXTRAS, "--python-platform", "x86_64-manylinux_2_28"),
}
WITH_EXTRAS = re.compile(r"^([a-z0-9-]+)\[[^]]+\](==.*\n(?: +--hash=.*\n)+)", flags=re.MULTILINE)
EDITABLE = ("-e", "packaging/client", "-e", ".[dev]")


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


def write_locks() -> None:
    """Let uv write every lock, and put them in place only when all are right."""
    fixed = (
        f"-c {LOCK.name} --generate-hashes --no-strip-extras --python-version 3.11 --quiet".split()
    )
    fixed += ["--no-emit-package", "tuneship-client", "--custom-compile-command", "make lock"]
    fixed += places_of_wheels()
    with tempfile.TemporaryDirectory(dir=LOCKED) as folder:
        for name, source in LOCKS.items():
            options = [*source, *fixed, "-o", str(Path(folder) / name)]
            subprocess.run(
                [sys.executable, "-m", "uv", "pip", "compile", *options], cwd=ROOT, check=True
            )
            # Up to version 23.2, pip asks for version and hashes of `name[extra]` and of `name` apart.
            file = Path(folder) / name
            file.write_text(WITH_EXTRAS.sub(r"\1\2\g<0>", file.read_text()))
        text = (Path(folder) / "service.txt").read_text()
        if not re.search(r"^torch==\S+\+cpu ", text, flags=re.MULTILINE):
            sys.exit("torch is not its CPU build: let pip's find-links name a folder that has it")
        for name in LOCKS:
            (Path(folder) / name).replace(LOCKED / name)


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
        write_locks()  # uv reads the new lines
    except BaseException:
        LOCK.write_text(before)
        raise
    sys.stdout.write(f"{LOCK.name}: {len(pins)} lines kept, added: {', '.join(added) or 'none'}\n")


if __name__ == "__main__":
    main()
