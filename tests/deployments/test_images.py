"""Both images are built and tried on this machine, and the files beside them say what is inside."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from scripts.image import IMAGES, LOCKS, debian_components, for_the_images, missing
from tests.support.package_index import need_package_index
from tests.support.service.processes import ROOT


def test_a_download_takes_what_the_images_python_may_need() -> None:
    hashes = " \\\n    --hash=sha256:00\n"
    old, new, other, plain = (
        f"old==1 ; python_full_version < '3.11.3'{hashes}",
        f"new==1 ; python_full_version >= '3.13'{hashes}",
        f"other==1 ; sys_platform == 'win32'{hashes}",
        f"plain==1{hashes}",
    )
    taken = for_the_images(f"# a comment\n{old}{new}{other}{plain}")
    assert taken == f"# a comment\nold==1{hashes}plain==1{hashes}"


def test_a_package_of_debian_has_the_licences_that_its_copyright_file_names(tmp_path: Path) -> None:
    (tmp_path / "var" / "lib" / "dpkg").mkdir(parents=True)
    entries = [
        f"Package: {name}\nStatus: {status}\nArchitecture: amd64\nVersion: 1:2.0-1\n"
        for name, status in (
            ("listed", "install ok installed"),
            ("prose", "install ok installed"),
            ("bare", "install ok installed"),
            ("gone", "deinstall ok config-files"),
        )
    ]
    (tmp_path / "var" / "lib" / "dpkg" / "status").write_text("\n".join(entries))
    listed = "Format: https://example.org\n\nFiles: *\nLicense: GPL-2+ or Artistic\n\nLicense: MIT\n text"
    for name, text in (("listed", listed), ("prose", "It is free.\nLicense: see below\n")):
        (tmp_path / "usr" / "share" / "doc" / name).mkdir(parents=True)
        (tmp_path / "usr" / "share" / "doc" / name / "copyright").write_text(text)
    found = {one["name"]: one for one in debian_components(tmp_path)}
    assert set(found) == {"listed", "prose", "bare"}
    assert found["bare"]["purl"] == "pkg:deb/debian/bare@1%3A2.0-1?arch=amd64"
    names = [one["license"]["name"] for one in found["listed"]["licenses"]]
    assert names == ["GPL-2+ or Artistic", "MIT"]
    assert not any("licenses" in found[name] for name in ("prose", "bare"))


def test_a_step_that_fails_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    if lacking := missing():
        pytest.skip(f"images need {', '.join(lacking)}")
    # pip has no place to take anything from.
    nowhere = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    command = [sys.executable, "-m", "scripts.image", "--out", tmp_path / "out"]
    environment = os.environ | nowhere
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    said = done.stderr.splitlines()
    assert re.fullmatch(r"make image: python\S* ended with 1", said[-1]), done.stderr
    assert "Traceback" not in done.stderr
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["wheels"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of `make image`, which has tried both images."""
    if lacking := missing():
        pytest.skip(f"images need {', '.join(lacking)}")
    need_package_index()
    folder = tmp_path_factory.mktemp("images")
    command = [sys.executable, "-m", "scripts.image", "--out", folder]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    yield folder
    shutil.rmtree(folder)


def member(archive: tarfile.TarFile, name: str) -> Any:
    file = archive.extractfile(name)
    assert file is not None
    return json.load(file)


@pytest.mark.soak
@pytest.mark.long
@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_and_its_files_say_what_it_is(made: Path, name: str) -> None:
    (file,) = made.glob(f"{name}-[0-9]*.oci.tar")
    digest = file.with_suffix(".digest").read_text().strip()
    with tarfile.open(file) as archive:
        (manifest,) = member(archive, "index.json")["manifests"]
        assert manifest["digest"] == digest
        described = member(archive, f"blobs/sha256/{digest.removeprefix('sha256:')}")
        image = member(archive, f"blobs/{described['config']['digest'].replace(':', '/')}")
    assert image["config"]["User"] == "10001"
    assert image["config"]["Labels"]["org.opencontainers.image.licenses"] == "Apache-2.0"
    listed = file.with_suffix(".cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(listed) is None
    inside = json.loads(listed)
    assert inside["metadata"]["component"]["hashes"][0]["content"] in digest
    listed_python = {
        f"{one['name']}=={one['version']}"
        for one in inside["components"]
        if one["purl"].startswith("pkg:pypi/")
    }
    locks = [lock for lock in LOCKS if lock != "build" and (lock != "node" or name.endswith(lock))]
    for lock in locks:
        text = for_the_images((ROOT / "packaging" / "locked" / f"{lock}.txt").read_text())
        locked = re.findall(r"^([a-z0-9-]+)(?:\[.*\])?(==\S+)", text, re.MULTILINE)
        assert {"".join(one) for one in locked} <= listed_python
    without = [one["name"] for one in inside["components"] if "licenses" not in one]
    assert len(without) < len(inside["components"]) / 4, without
    kinds = {one["purl"].partition("@")[0] for one in inside["components"]}
    assert {"pkg:deb/debian/python3.11", "pkg:deb/debian/tini", "pkg:pypi/torch"} <= kinds
    assert {"pkg:pypi/tuneship", "pkg:pypi/tuneship-client"} <= kinds
    assert ("pkg:pypi/ray" in kinds) == name.endswith("node")
    unwanted = {
        "pkg:pypi/pip",
        "pkg:pypi/hatchling",
        "pkg:deb/debian/gcc",
        "pkg:deb/debian/python3-venv",
    }
    assert not kinds & unwanted
