"""The list of components is valid CycloneDX by the official schema, and says what is installed."""

import json
from importlib import metadata

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tuneship.dossier.components import components_running


def test_it_fits_the_official_schema() -> None:
    schema = JsonStrictValidator(SchemaVersion.V1_6)
    listed = components_running()
    assert schema.validate_str(json.dumps(listed)) is None
    # The schema refuses what is wrong, so the line above says something.
    assert schema.validate_str(json.dumps(listed | {"components": [{"type": "wheel"}]}))


def test_it_has_what_is_installed_once_in_its_version() -> None:
    listed = components_running()
    found = {one["name"]: one["version"] for one in listed["components"]}
    assert len(found) == len(listed["components"])
    for name in ("pydantic", "httpx", "prefect", "tuneship-client"):
        assert found[name] == metadata.version(name)
    assert listed["metadata"]["component"]["version"] == metadata.version("tuneship")
