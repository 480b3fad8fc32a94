"""Sets up a Prefect server for tuneship, idempotently: work pool, flows, automations, credentials.

`python -m deployments.set_up`, in the project's folder, does it for the server of PREFECT_API_URL (or of the active
profile). `make up` runs it for its own server.
"""

import argparse
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from httpx import HTTPError
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists, PrefectException
from prefect.settings import get_current_settings
from prefect.workers.process import ProcessWorker

from deployments.automations import bring_all_up_to_date
from deployments.blocks import store_credentials
from deployments.commands import CommandFailed, run_module
from deployments.definitions import PREFECT_YAML, WORK_POOL, write_merged
from flows.script.local_processes import REFUSED_BY_PREFECT, is_refused
from tuneship.client import TuneshipError
from tuneship.settings import embedded_service_environment


def set_up() -> None:
    """Create or update the work pool, the deployments of `prefect.yaml`, the automations and the block.

    Settings that people have changed on the server stay (`definitions.py`). Raises `CommandFailed`, and what Prefect's
    client raises.
    """
    if not PREFECT_YAML.is_file():
        raise CommandFailed(
            f"{PREFECT_YAML} does not exist: `tuneship init` writes a whole project"
        )
    template = ProcessWorker.get_default_base_job_template()
    pool = WorkPoolCreate(name=WORK_POOL, type=ProcessWorker.type, base_job_template=template)
    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
        client.create_work_pool(pool)
    with TemporaryDirectory() as folder:
        file = Path(folder) / PREFECT_YAML.name
        write_merged(file)
        deploy = ("--no-prompt", "deploy", "--all", "--prefect-file", str(file))
        run_module("`prefect deploy` failed", embedded_service_environment(), "prefect", *deploy)
    bring_all_up_to_date()
    store_credentials()


if __name__ == "__main__":
    argparse.ArgumentParser(prog="deployments.set_up", description=__doc__).parse_args()
    # Without a named server, Prefect would set up one that ends with the command.
    if not get_current_settings().api.url:
        sys.exit("no Prefect server is named: set PREFECT_API_URL, as in http://127.0.0.1:4200/api")
    try:
        set_up()
    except (CommandFailed, TuneshipError) as failure:
        sys.exit(str(failure))
    except (PrefectException, HTTPError) as failure:
        if is_refused(failure):
            sys.exit(REFUSED_BY_PREFECT)
        # Their messages may go on for lines.
        first = f"{type(failure).__name__}: {failure}".splitlines()[0]
        sys.exit(f"the Prefect server of PREFECT_API_URL: {first}")
