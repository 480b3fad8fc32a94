"""The list of components is valid CycloneDX by the official schema, and says what is installed."""

import json
from importlib import metadata
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tuneship.dossier.components import components, components_running


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


@pytest.mark.parametrize(
    ("fields", "licenses"),
    [
        ("License-Expression: MIT\nLicense: other\n", [{"expression": "MIT"}]),
        ("License: Apache 2.0\nClassifier: License :: x\n", [{"license": {"name": "Apache 2.0"}}]),
        (
            "License: Copyright 2026\n  the whole text\nClassifier: License :: OSI Approved :: BSD License\n",
            [{"license": {"name": "BSD License"}}],
        ),
        ("License: UNKNOWN\n", None),
        ("", None),
    ],
)
def test_a_licence_is_what_the_metadata_names(
    tmp_path: Path, fields: str, licenses: list[object] | None
) -> None:
    folder = tmp_path / "thing-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: thing\nVersion: 1\n{fields}")
    listed = components(metadata.distributions(path=[str(tmp_path)]), [])
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(listed)) is None
    (found,) = listed["components"]
    assert found.get("licenses") == licenses
