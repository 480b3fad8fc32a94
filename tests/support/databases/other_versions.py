"""Make a version after this one: a copy of the package with one more migration."""

import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.service.processes import ROOT, Starter
from tuneship.store.database.database import HEAD

# The migration of the next version.
NEXT = "9001"


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

    def started(module: str, *arguments: str, env: Mapping[str, str], **options: Any) -> Any:
        command = [sys.executable, "-m", module, *arguments]
        own = {**env, "PYTHONPATH": str(folder)}
        return subprocess.Popen(
            command, cwd=folder, env=own, stdout=subprocess.PIPE, text=True, **options
        )

    return started
