"""Make the version after this, a copy of the package with one more migration, and 26.12.0, from the history."""

import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from tests.support.service.processes import ROOT, Starter
from tuneship.store.database.database import HEAD

# The migration of the next version.
NEXT = "9001"
# The last commit of 26.12.0.
FIRST_RELEASE = "29a74d87001509876295939bf9eacb851f85c8ed"


def add_migration(migrations: Path) -> None:
    """Add a migration to a copy of those of this version."""
    (migrations / "versions" / f"{NEXT}_next.py").write_text(
        "import sqlalchemy as sa\nfrom alembic import op\n"
        f"revision, down_revision, branch_labels, depends_on = {NEXT!r}, {HEAD!r}, None, None\n"
        "def upgrade():\n"
        "    op.add_column('endpoints', sa.Column('note', sa.Text(), nullable=True))\n"
    )


def next_version(folder: Path, *, works_with: str) -> Starter:
    """Make the next version, and return a function that runs its modules with the libraries of this environment."""
    shutil.copytree(
        ROOT / "tuneship", folder / "tuneship", ignore=shutil.ignore_patterns("__pycache__")
    )
    store = folder / "tuneship" / "store"
    add_migration(store / "migrations")
    file = store / "database" / "database.py"
    new = f'WORKS_WITH = "{works_with}"'
    file.write_text(re.sub(r'^WORKS_WITH = ".*"$', new, file.read_text(), flags=re.MULTILINE))
    return _starter(folder)


def first_release(folder: Path) -> Starter | None:
    """Make 26.12.0 as `next_version` does; None without the history that has it."""
    packed = subprocess.run(
        ["git", "archive", FIRST_RELEASE, "tuneship"],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if packed.returncode:
        return None
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return _starter(folder)


def _starter(folder: Path) -> Starter:
    def started(module: str, *arguments: str, env: Mapping[str, str], **options: Any) -> Any:
        command = [sys.executable, "-m", module, *arguments]
        own = {**env, "PYTHONPATH": str(folder)}
        return subprocess.Popen(
            command, cwd=folder, env=own, stdout=subprocess.PIPE, text=True, **options
        )

    return started
