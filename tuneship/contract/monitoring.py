"""The metrics of the service in the text formats of Prometheus; `docs/observability.md` names each of them.

A key sees the series of its own tenant, with the scope `machine:read` also those of the machine: its processes and
memory, and sums over all tenants. Labels hold ids and the service's own words, never a name or a text that somebody
chose.
"""

from tuneship.contract.declaring.examples import CANDIDATE
from tuneship.contract.declaring.operation import Example, operation
from tuneship.contract.declaring.verbs import C_co, Resource, Verb

PROMETHEUS_TEXT, OPENMETRICS_TEXT = "text/plain", "application/openmetrics-text"
EXAMPLE_TEXT = f"""\
# HELP tuneship_generations_in_flight Generations that were accepted and have not ended.
# TYPE tuneship_generations_in_flight gauge
tuneship_generations_in_flight{{deployment_id="{CANDIDATE}"}} 3.0
"""


@operation(
    "GET",
    "/metrics",
    scope="metrics:read",
    media=(PROMETHEUS_TEXT, OPENMETRICS_TEXT),
    takes_key_alone=True,
    example=Example(reply=EXAMPLE_TEXT),
)
def read_metrics() -> str:
    """Read the metrics of the service for Prometheus. `Accept` chooses between its text format and OpenMetrics."""
    raise NotImplementedError


class Monitoring(Resource[C_co]):
    """The numbers that the service counts and measures."""

    metrics = Verb(read_metrics)
