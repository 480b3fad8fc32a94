"""Sets up a Prefect server for tuneship, idempotently: work pool, flows, automations, credentials.

`python -m deployments.set_up`, in the project's folder, does it for the server of PREFECT_API_URL (or of the active
profile). `make up` calls it for its own server.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping
from tempfile import TemporaryDirectory

from prefect.settings import get_current_settings

from deployments.definitions import PREFECT_YAML
from tuneship.settings import embedded_service_environment

WORK_POOL = "tuneship"


class SetUpFailed(Exception):
    """A command of Prefect failed; the message holds its last line."""


def register(environment: Mapping[str, str]) -> None:
    """Create or update the work pool, the deployments of `prefect.yaml`, the automations and the block.

    Settings that people have changed on the server stay (`definitions.py`). Raises `SetUpFailed`.
    """
    if not PREFECT_YAML.is_file():
        raise SetUpFailed(f"{PREFECT_YAML} does not exist: `tuneship init` writes a whole project")
    prefect = ("prefect",)
    _run(
        environment, *prefect, "work-pool", "create", WORK_POOL, "--type", "process", "--overwrite"
    )
    with TemporaryDirectory() as folder:
        file = f"{folder}/{PREFECT_YAML.name}"
        _run(environment, "deployments.definitions", file)
        _run(environment, *prefect, "--no-prompt", "deploy", "--all", "--prefect-file", file)
    _run(environment, "deployments.automations")
    _run(environment, "deployments.blocks")


def _run(environment: Mapping[str, str], *arguments: str) -> None:
    """Run a module in a process of its own, because Prefect reads the environment when it is imported."""
    done = subprocess.run(  # noqa: S603 - our own programs and Prefect's
        [sys.executable, "-m", *arguments],
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=PREFECT_YAML.parent,
    )
    if done.returncode:
        said = (done.stdout + done.stderr).strip().splitlines()
        what = " ".join(arguments[:2])
        raise SetUpFailed(f"{what} failed: {said[-1] if said else 'no message'}")


if __name__ == "__main__":
    argparse.ArgumentParser(prog="deployments.set_up", description=__doc__).parse_args()
    # Without a named server, Prefect would set up one that ends with the command.
    if not get_current_settings().api.url:
        sys.exit("no Prefect server is named: set PREFECT_API_URL, as in http://127.0.0.1:4200/api")
    try:
        register(embedded_service_environment())
    except SetUpFailed as failure:
        sys.exit(str(failure))
