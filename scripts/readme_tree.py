"""Write the file tree of README.md: every tracked file with the first sentence of its own docstring.

Run it after adding a file: `python scripts/readme_tree.py`. `tests/test_readme.py` fails when the tree is not current.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- tree: python scripts/readme_tree.py -->", "<!-- end of tree -->"
WIDTH = 118
FOLDERS = {
    ".ci": "what CI runs",
    "benchmarks": "figures measured on the machine at hand (`make bench`)",
    "deployments": "what runs where",
    "docs": "what no single file can tell",
    "examples": "the demo, and a release of one's own files",
    "examples/icd10cm": "real diagnosis texts of the public ICD-10-CM tabular list",
    "flows": "Prefect flows: order, gates, decisions",
    "flows/rollout": "the parts of a canary roll-out",
    "scripts": "programs for those who work on tuneship itself",
    "tasks": "one task = one API operation, its retry policy, run name and idempotency key",
    "tests": "mirrors the rooms; end_to_end/ starts everything as a user would",
    "tuneship": "the library; knows nothing of Prefect",
    "tuneship/base_models": "base models that are shipped",
    "tuneship/client": "the typed client, sync and async from one core",
    "tuneship/contract": "THE wire: models, operations, errors; one file per resource",
    "tuneship/events": "webhooks go out: addresses, signatures, tries, a queue per receiver",
    "tuneship/gates": "pure: measurements + limits -> verdict",
    "tuneship/metrics": "pure: observations -> windows, percentiles, rates; and the recorder",
    "tuneship/runtime": "start, watch and stop worker processes",
    "tuneship/service": "what each operation does; one file per resource",
    "tuneship/serving": "token ids in -> token ids out: continuous batching over one base and many adapters",
    "tuneship/store": "rows, migrations, blobs, leases",
    "tuneship/traffic": "pure: split + draw -> deployment",
    "tuneship/training": "dataset files in -> adapter and progress lines out",
}
FILES = {
    "CHANGELOG.md": "what a user notices, release by release",
    "Makefile": "demo, test, check, bench; each does its own set-up",
    "README.md": "this file",
    "constraints.txt": "the versions that were built and measured with",
    "prefect.yaml": "what the Prefect UI can start",
    "pyproject.toml": "packaging, extras, tools, import rules",
    ".ci/run": "checks, then tests, on a bare machine",
    ".gitignore": "what is not kept",
    "deployments/worker.env.example": "the settings of a Prefect worker",
    "docs/api-decisions.md": "every gap of the API description, with what was decided and why",
    "docs/architecture.md": "the two halves, the rooms, who may import whom",
    "docs/datasets.md": "what a line may hold, what is refused",
    "docs/gates.md": "how the gates decide",
    "docs/webhooks.md": "how to receive, verify and repeat webhooks",
    "docs/openapi.json": "the API as OpenAPI 3.1, written by `tuneship openapi`",
    "examples/release.yaml": "annotated parameters of a release",
}
WHOLE = ("examples/icd10cm", "tuneship/base_models", "tuneship/store/migrations", "tests")
"""Folders shown as one line."""


def tree() -> str:
    """The tree as a code block."""
    lines: list[str] = []
    seen: set[str] = set()
    for file in _tracked():
        for depth, folder in enumerate(_folders(file)):
            if folder not in seen:
                seen.add(folder)
                lines.append(_line(depth, f"{folder.rpartition('/')[2]}/", FOLDERS.get(folder, "")))
        if not file.startswith(tuple(f"{folder}/" for folder in WHOLE)):
            lines.append(_line(file.count("/"), file.rpartition("/")[2], _purpose(file)))
    return "\n".join([BEGIN, "```", *lines, "```", END])


def _tracked() -> list[str]:
    git = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    told = subprocess.run(git, capture_output=True, text=True, check=True)
    files = [file for file in told.stdout.splitlines() if (ROOT / file).is_file()]
    files = [file for file in files if not file.endswith("__init__.py")]
    return sorted(files, key=lambda file: ("/" in file, file))


def _folders(file: str) -> list[str]:
    """Every folder above the file that has a line, from the top."""
    parts = file.split("/")[:-1]
    folders = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    return [one for one in folders if not one.startswith(tuple(f"{whole}/" for whole in WHOLE))]


def _purpose(file: str) -> str:
    if file in FILES or not file.endswith(".py"):
        return FILES.get(file, "")
    text = ast.get_docstring(ast.parse((ROOT / file).read_text())) or ""
    return re.split(r"(?<=[a-z)`])[.;](?:\s|$)", " ".join(text.split("\n\n")[0].split()))[0]


def _line(depth: int, name: str, purpose: str) -> str:
    line = f"{'  ' * depth}{name}".ljust(34) + purpose
    return (line if len(line) <= WIDTH else f"{line[: WIDTH - 3].rstrip()}...").rstrip()


def with_tree(readme: str) -> str:
    """The README with its tree brought up to date."""
    before, _, rest = readme.partition(BEGIN)
    return before + tree() + rest.partition(END)[2]


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_tree(path.read_text()))
    sys.stdout.write("README.md: tree written\n")
