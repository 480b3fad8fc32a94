"""The series of the machine: its processes, memory and disk, and sums over all tenants without their names."""

import shutil
from importlib.metadata import version

import sqlalchemy as sa

from tuneship.host.machine import resident_memory
from tuneship.host.memory import free_memory
from tuneship.metrics.windows import MetricWindow
from tuneship.service.context.context import Context
from tuneship.service.monitoring import metric_list
from tuneship.service.monitoring.scrape import Scrape
from tuneship.service.monitoring.tenant_series import add_states, age_s, embeddings, outcomes
from tuneship.store.records import state_counts


def add_machine(
    scrape: Scrape, context: Context, connection: sa.Connection, together: MetricWindow
) -> None:
    """Add the series of the machine; `together` has the generations of all tenants."""
    parts = context.parts
    scrape.add(metric_list.BUILD, 1, version("tuneship"))
    for operation, tally in sorted(parts.request_counts.by_operation(None).items()):
        for status, count in sorted(tally.statuses.items()):
            scrape.add(metric_list.ALL_REQUESTS, count, operation, status)
    for outcome, count in outcomes(together):
        scrape.add(metric_list.ALL_GENERATIONS, count, outcome)
    scrape.add(metric_list.ALL_TOKENS, together.input_tokens, "input")
    scrape.add(metric_list.ALL_TOKENS, together.output_tokens, "output")
    for metric, count in zip(metric_list.ALL_EMBEDDINGS, embeddings(together), strict=True):
        scrape.add(metric, count)
    scrape.add_sketch(metric_list.ALL_DURATION, together.latencies, together.latency_sum_ms)
    scrape.add_sketch(
        metric_list.ALL_FIRST_TOKEN, together.first_tokens, together.first_token_sum_ms
    )
    scrape.add(metric_list.ALL_IN_FLIGHT, parts.in_flight.total())
    add_states(scrape, metric_list.ALL_STATES, connection)
    now, backlogs = context.now, state_counts.webhook_backlogs(connection)
    scrape.add(metric_list.ALL_PENDING, sum(one.pending for one in backlogs))
    oldest = max((age_s(one.oldest, now) for one in backlogs), default=0.0)
    scrape.add(metric_list.ALL_OLDEST, oldest)
    if parts.signed_audit.complete_at is not None:
        scrape.add(metric_list.AUDIT_AGE, age_s(parts.signed_audit.complete_at, now))
    scrape.add(metric_list.FREE_MEMORY, free_memory())
    scrape.add(metric_list.FREE_DISK, shutil.disk_usage(parts.settings.data_dir).free)
    _add_replicas(scrape, context)


def _add_replicas(scrape: Scrape, context: Context) -> None:
    names = {base.path: base.id for base in context.parts.catalogue}
    # A copy, because the event loop may add a group meanwhile.
    for path, group in dict(context.parts.replicas.groups).items():
        base = names.get(path)
        if base is None:  # no longer in the catalogue
            continue
        for one in group.live:
            labels = (base, str(one.number))
            if group.is_here:
                scrape.add(metric_list.REPLICA_MEMORY, resident_memory(one.worker.pid), *labels)
            for name, metric in metric_list.OF_REPLICAS.items():
                if name in one.stats:
                    scrape.add(metric, one.stats[name], *labels)
