"""A new read operation takes a declaration and a handler, in one file each. Everything else follows from them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CONTRACT, HANDLER = "tuneship/contract/instances.py", "tuneship/service/models/instances.py"

DECLARATION = '''
@operation(
    "GET",
    "/v1/instance-types/{name}",
    scope="jobs:read",
    errors=(ResourceNotFound,),
    example=Example(
        reply={
            "name": "local",
            "compute_type": "cpu",
            "available": True,
            "cpus": 2,
            "memory_gb": 7.6,
            "gpus": 0,
        }
    ),
)
def get_instance_type(name: str) -> InstanceType:
    """Fetch one instance type."""
    raise NotImplementedError


'''
VERB = "    get = Verb(get_instance_type)\n"

HANDLER_CODE = '''

@serves(contract.get_instance_type)
def get_instance_type(context: Context, name: str) -> InstanceType:
    """Show one type of the catalogue."""
    kind = _kind(context, name, "name")
    return next(one for one in list_instance_types(context).instance_types if one.name == kind.name)
'''

# This program runs in the changed copy and calls the whole service through a socket.
USE = """
import asyncio, sys
from pathlib import Path

from pydantic import SecretStr

from tuneship.prefect.connection import connect
from tuneship.prefect.tasks import task_of
from tests.support.service.in_process import Service
from tuneship.client import AsyncClient, Client
from tuneship.contract import instances
from tuneship.contract.document.openapi import document
from tuneship.settings import ClientSettings

assert instances.__file__.startswith(sys.argv[1]), instances.__file__

async def from_async_client(settings):
    async with AsyncClient(settings) as client:
        return await client.instance_types.get("local")

with Service(Path(sys.argv[1]) / "data") as service:
    service.listen()
    key = service.headers["alice"]["Authorization"].removeprefix("Bearer ")
    settings = ClientSettings(url=service.url, api_key=SecretStr(key), client_id="alice")
    with Client(settings) as client:
        fetched = client.instance_types.get("local")
        assert asyncio.run(from_async_client(settings)) == fetched
        connect(settings, client)
        assert task_of(instances.get_instance_type).fn("local") == fetched
    assert fetched in service.run(service.client().instance_types.list()).instance_types

from typer.testing import CliRunner
from tuneship.cli.main import app
help_text = CliRunner().invoke(app, ["instance-types", "get", "--help"]).output
assert "Fetch one instance type." in help_text, help_text

entry = document()["paths"]["/v1/instance-types/{name}"]["get"]
assert entry["operationId"] == "get_instance_type"
assert entry["responses"]["200"]["content"]["application/json"]["example"]["name"] == "local"
"""


def python_files(root: Path) -> dict[str, str]:
    """Return the text of every file of the product, by its path."""
    files = [file for room in ("tuneship", "tasks") for file in (root / room).rglob("*.py")]
    return {str(file.relative_to(root)): file.read_text() for file in files}


@pytest.mark.slow
def test_a_new_read_operation_touches_two_files(tmp_path: Path) -> None:
    for room in ("tuneship", "tasks"):
        shutil.copytree(ROOT / room, tmp_path / room)

    contract = tmp_path / CONTRACT
    text = contract.read_text()
    text = text.replace("class InstanceTypeResource", f"{DECLARATION}class InstanceTypeResource")
    text = text.replace(
        "from tuneship.contract.declaring.operation",
        "from tuneship.contract.errors import ResourceNotFound\nfrom tuneship.contract.declaring.operation",
    )
    contract.write_text(text + VERB)
    with (tmp_path / HANDLER).open("a") as handler:
        handler.write(HANDLER_CODE)

    # The copy comes first on the path, so that it hides the packages of this repository. Only tests/ comes from here.
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    used = subprocess.run(
        [sys.executable, "-c", USE, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert used.returncode == 0, used.stderr
    before, after = python_files(ROOT), python_files(tmp_path)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed == {CONTRACT, HANDLER}
