"""Adds to `constraints.txt` whatever an installation of `.[dev]` takes and no line names yet; lines that stand stay.

`make lock`, after a change of what `pyproject.toml` asks for. To move a version, change or remove its line first.
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
    """As PEP 503 compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def resolved() -> dict[str, str]:
    """What pip would install into an empty environment under the lines that stand, by name."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        options = ["--quiet", "--dry-run", "--ignore-installed", "--report", str(report)]
        subprocess.run(
            [sys.executable, "-m", "pip", "install", *options, "-c", str(LOCK), "-e", ".[dev]"],
            cwd=ROOT,
            check=True,
        )
        items = json.loads(report.read_text())["install"]
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in items}


def main() -> None:
    """Write the file again, its head first, then lines by name."""
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
    sys.stdout.write(f"{LOCK.name}: {len(pins)} lines stand, added: {', '.join(added) or 'none'}\n")


if __name__ == "__main__":
    main()
