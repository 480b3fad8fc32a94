"""Adds the packages that `.[dev]` installs to `constraints.txt`, where they have no line yet; existing lines stay.

Run `make lock` after a change of the dependencies in `pyproject.toml`. To change a version, change or remove its line
first.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "constraints.txt"
OWN = "tuneship"


def canonical(name: str) -> str:
    """The normal form of a package name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolved() -> dict[str, str]:
    """The versions that pip would install into an empty environment under the existing lines, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, "-c", str(LOCK), "-e", ".[dev]"],
            cwd=ROOT,
            check=True,
        )
        items = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in items}


def main() -> None:
    """Rewrite the file: its comments first, then the lines sorted by name."""
    lines = LOCK.read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    pins = [line for line in lines if line and not line.startswith("#")]
    named = {canonical(line.partition("==")[0]) for line in pins}
    added = [
        f"{name}=={version}"
        for name, version in resolved().items()
        if canonical(name) not in named and name != OWN
    ]
    LOCK.write_text("\n".join([*head, *sorted([*pins, *added], key=str.lower)]) + "\n")
    sys.stdout.write(f"{LOCK.name}: {len(pins)} lines kept, added: {', '.join(added) or 'none'}\n")


if __name__ == "__main__":
    main()
