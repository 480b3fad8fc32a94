"""The series of one tenant: its requests, its generations, and the state of its resources."""

from collections.abc import Iterable
from datetime import datetime
from itertools import accumulate

import sqlalchemy as sa

from tuneship.metrics.observations import RequestOutcome
from tuneship.metrics.recorder import Totals
from tuneship.metrics.windows import MetricWindow
from tuneship.service.context.context import Context
from tuneship.service.monitoring import metric_list
from tuneship.service.monitoring.metric_list import MetricKind
from tuneship.service.monitoring.scrape import Scrape
from tuneship.service.telemetry.request_counts import EDGES_S
from tuneship.store.records import state_counts

REQUEST_EDGES = tuple(map(str, EDGES_S))


def add_tenant(scrape: Scrape, context: Context, connection: sa.Connection) -> Totals:
    """Add the series of the caller's tenant; return the totals that were read."""
    parts, client_id = context.parts, context.client_id
    for operation, tally in sorted(parts.request_counts.by_operation(client_id).items()):
        for status, count in sorted(tally.statuses.items()):
            scrape.add(metric_list.REQUESTS, count, operation, status)
        counts = list(accumulate(tally.cells))
        scrape.add_histogram(
            metric_list.REQUEST_DURATION, REQUEST_EDGES, counts, tally.seconds, operation
        )
    deployments = state_counts.deployments_of(connection, client_id)
    endpoints = state_counts.endpoints_of(connection, client_id)
    totals = parts.recorder.totals({row["id"] for row in deployments})
    known_endpoints = {"", *(row["id"] for row in endpoints)}
    for target, total in sorted(totals.by_target.items()):
        if target[1] in known_endpoints:
            _add_generations(scrape, total, target)
    for row in deployments:
        in_flight, identifier = parts.in_flight, row["id"]
        scrape.add(metric_list.IN_FLIGHT, in_flight.accepted(identifier), identifier)
        scrape.add(metric_list.QUEUED, in_flight.queued(identifier), identifier)
        scrape.add(metric_list.REPLICAS, row["current_replicas"], identifier)
        scrape.add(metric_list.HEALTHY, row["health"] == "healthy", identifier)
    for row in endpoints:
        for member in row["members"]:
            scrape.add(metric_list.TRAFFIC, member["traffic_percentage"], row["id"], member["id"])
    add_states(scrape, metric_list.STATES, connection, client_id)
    backlogs, now = state_counts.webhook_backlogs(connection, client_id), context.now
    for one in backlogs:
        scrape.add(metric_list.PENDING, one.pending, one.webhook_id)
        scrape.add(metric_list.OLDEST, age_s(one.oldest, now), one.webhook_id)
        scrape.add(metric_list.ACTIVE, one.is_active, one.webhook_id)
    return totals


def outcomes(total: MetricWindow) -> Iterable[tuple[str, int]]:
    """The generations of a window by outcome."""
    return (
        (RequestOutcome.SUCCESS, total.request_count - total.error_count),
        (RequestOutcome.SERVER_ERROR, total.error_count),
        (RequestOutcome.CANCELLED, total.cancelled_count),
        (RequestOutcome.REFUSED, total.refused_count),
    )


def embeddings(total: MetricWindow) -> tuple[int, int, int]:
    """The requests for embeddings of a window, their texts and the tokens of these."""
    return total.embedding_count, total.embedded_texts, total.embedded_tokens


def _add_generations(scrape: Scrape, total: MetricWindow, target: tuple[str, str]) -> None:
    for outcome, count in outcomes(total):
        scrape.add(metric_list.GENERATIONS, count, *target, outcome)
    scrape.add(metric_list.TOKENS, total.input_tokens, *target, "input")
    scrape.add(metric_list.TOKENS, total.output_tokens, *target, "output")
    scrape.add(metric_list.EMPTY, total.empty_count, *target)
    for metric, count in zip(metric_list.EMBEDDINGS, embeddings(total), strict=True):
        scrape.add(metric, count, *target)
    latencies, first_tokens = total.latencies, total.first_tokens
    scrape.add_sketch(metric_list.GENERATION_DURATION, latencies, total.latency_sum_ms, *target)
    scrape.add_sketch(metric_list.FIRST_TOKEN, first_tokens, total.first_token_sum_ms, *target)


def add_states(
    scrape: Scrape,
    kinds: Iterable[tuple[sa.Table, MetricKind]],
    connection: sa.Connection,
    client_id: str | None = None,
) -> None:
    """Add the resources of a tenant, or of all, by state, with a zero for a state that none is in."""
    for table, kind in kinds:
        counts = state_counts.by_status(connection, table, client_id)
        for state in table.c.status.info["states"]:
            # Rows of what was deleted stay, so their number would only ever grow.
            if state != "deleted":
                scrape.add(kind, counts.get(state, 0), state)


def age_s(moment: datetime | None, now: datetime) -> float:
    """Seconds since a moment; 0 without a moment, or if the clock was set back."""
    return 0.0 if moment is None else max(0.0, (now - moment).total_seconds())
