"""Links on the run page to the jobs, deployments and endpoint of a release, each as soon as it exists.

They lead to the service's own address of the resource, which requires an API key.
"""

from prefect import get_run_logger
from prefect.artifacts import create_link_artifact

from tuneship.client import base_url
from tuneship.prefect.connection import api

# By the artifact's key.
PATHS = {
    "job": "fine-tuning/jobs",
    "baseline": "deployments",
    "candidate": "deployments",
    "endpoint": "canary-endpoints",
}


def show_link(kind: str, resource_id: str) -> None:
    """Put a link on the page of this run; one that cannot be written never stops a release."""
    url = f"{base_url(api().settings.url)}/v1/{PATHS[kind]}/{resource_id}"
    try:
        create_link_artifact(url, link_text=resource_id, key=kind, description=kind)
    except Exception as error:  # noqa: BLE001 - the Prefect server may be away; the release matters more
        get_run_logger().warning("a link was not written (%s)", type(error).__name__)
