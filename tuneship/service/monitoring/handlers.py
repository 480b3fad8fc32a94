"""Handler of `GET /metrics`: collects existing counts of the service and renders them for Prometheus."""

from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector

from tuneship.contract import monitoring as contract
from tuneship.service.context.bindings import serves
from tuneship.service.context.context import Context
from tuneship.service.monitoring.machine_series import add_machine
from tuneship.service.monitoring.scrape import Scrape
from tuneship.service.monitoring.tenant_series import add_tenant
from tuneship.service.telemetry.record_keeper import store_metrics

MACHINE_SCOPE = "machine:read"
# Memory, processor time and open files of this process, under the names that all client libraries use.
PROCESS = ProcessCollector(registry=None)


@serves(contract.read_metrics)
def read_metrics(context: Context) -> bytes:
    """The series of the caller's tenant, and with the scope `machine:read` also those of the machine, as text."""
    # What is counted is handed to the database first, so that the totals and the API's metrics are equal.
    parts = context.parts
    store_metrics(parts.recorder, parts.database, parts.clock, parts.member_number)
    is_of_machine = MACHINE_SCOPE in context.scopes
    scrape = Scrape([PROCESS] if is_of_machine else [])
    with context.read() as connection:
        totals = add_tenant(scrape, context, connection)
        if is_of_machine:
            add_machine(scrape, context, connection, totals.together)
    encode, media_type = choose_encoder(context.accept)
    context.headers["Content-Type"] = media_type
    return encode(scrape)
