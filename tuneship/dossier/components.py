"""The distributions of this environment as a CycloneDX 1.6 list of components.

Without a time or a random number, so that one environment gives one list. The official schema is what a test validates
it against; the library that has the schema would add its own objects and four packages for these lines.
"""

import platform
import re
from collections.abc import Iterable
from functools import cache
from importlib import metadata
from typing import Any
from urllib.parse import quote

# Beside the report of a release, and in its dossier.
COMPONENTS = "components.cdx.json"


@cache
def components_running() -> dict[str, Any]:
    """Every installed distribution, and Python itself."""
    python = {
        "type": "platform",
        "name": platform.python_implementation(),
        "version": platform.python_version(),
    }
    return components(metadata.distributions(), [python])


def components(
    distributions: Iterable[metadata.Distribution], others: Iterable[dict[str, Any]]
) -> dict[str, Any]:
    """A list of these distributions and of `others`, which are components in CycloneDX's form and come first."""
    found: dict[str, dict[str, Any]] = {}
    for one in distributions:
        name = re.sub(r"[-_.]+", "-", one.name or "").lower()
        # The first of a name on the path is the one that is imported; a half removed one has no name.
        if name and name not in found:
            found[name] = _component(name, one)
    own = found.pop("tuneship", {"type": "library", "name": "tuneship"})
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own | {"type": "application"}},
        "components": [*others, *(found[name] for name in sorted(found))],
    }


def _component(name: str, one: metadata.Distribution) -> dict[str, Any]:
    purl = f"pkg:pypi/{quote(name)}@{quote(one.version, safe='')}"
    made: dict[str, Any] = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": one.version,
        "purl": purl,
    }
    if "License-Expression" in one.metadata:
        return made | {"licenses": [{"expression": one.metadata["License-Expression"]}]}
    # Older metadata has a name, or the whole text, in this field; what it always may have is classifiers.
    written = (text.strip() for text in one.metadata.get_all("License") or ())
    classifiers = one.metadata.get_all("Classifier") or ()
    licenses = named_licenses(text for text in written if text != "UNKNOWN" and "\n" not in text)
    return made | (
        licenses
        or named_licenses(
            text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License ::")
        )
    )


def named_licenses(names: Iterable[str]) -> dict[str, Any]:
    """The field of a component for licences that are known by names, which need not be SPDX's; empty for none."""
    named = [{"license": {"name": name}} for name in dict.fromkeys(names) if name]
    return {"licenses": named} if named else {}
