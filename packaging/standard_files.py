"""Puts files from elsewhere in the repository into a wheel; `files` of the hook's table says which, and where they go.

An editable installation gets none of them: it uses the repository itself, and copies would grow old beside it.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StandardFiles(BuildHookInterface[Any]):
    """The hook of both distributions."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to a wheel that is no editable one. Raises `FileNotFoundError`."""
        if version != "standard":
            return
        for source, target in self.config["files"].items():
            path = (Path(self.root) / source).resolve()
            if not path.exists():  # hatchling would leave it out without a word
                raise FileNotFoundError(f"{source}: named in pyproject.toml, and does not exist")
            build_data["force_include"][str(path)] = target
