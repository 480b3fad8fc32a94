"""Links on the run page to the jobs, deployments and endpoint of a release, each as soon as it exists.

They lead to the console's page of the resource, or, where the service has no console, to its own address there, which
requires an API key.
"""

import ssl

import httpx
from prefect import get_run_logger
from prefect.artifacts import create_link_artifact

from tuneship.client import base_url
from tuneship.prefect.connection import api
from tuneship.settings import ClientSettings

# By the artifact's key: in the console, and in the API.
PAGES = {
    "job": ("jobs", "fine-tuning/jobs"),
    "baseline": ("deployments", "deployments"),
    "candidate": ("deployments", "deployments"),
    "endpoint": ("endpoints", "canary-endpoints"),
}
TIMEOUT_S = 2.0


def show_link(kind: str, resource_id: str) -> None:
    """Put a link on the page of this run; one that cannot be written never stops a release."""
    try:
        settings = api().settings
        page, path = PAGES[kind]
        place = f"console/{page}" if has_console(settings) else f"v1/{path}"
        url = f"{base_url(settings.url)}/{place}/{resource_id}"
        create_link_artifact(url, link_text=resource_id, key=kind, description=kind)
    except Exception as error:  # noqa: BLE001 - the Prefect server may be away; the release matters more
        get_run_logger().warning("a link was not written (%s)", type(error).__name__)


def has_console(settings: ClientSettings) -> bool:
    """Whether the service answers a browser at the address that this process calls."""
    tls = ssl.create_default_context(cafile=settings.ca_file) if settings.ca_file else True
    url = f"{base_url(settings.url)}/console/sign-in"
    try:
        return httpx.get(url, timeout=TIMEOUT_S, trust_env=False, verify=tls).status_code == 200
    except httpx.HTTPError:
        return False
