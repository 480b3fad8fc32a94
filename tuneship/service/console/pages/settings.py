"""The settings that this installation enforces and allows, and what the session may do."""

from tuneship.service.console.installation_facts import InstallationFacts
from tuneship.service.console.page import page
from tuneship.service.console.page_client import PageClient


@page("/console/settings", at=("Operate", 4), name="Settings", is_live=False)
async def settings(client: PageClient) -> InstallationFacts:
    """It changes only when the service starts again."""
    return client.visit.installation
