"""Routes a request to a deployment, limits its time, and records how it ends.

`generation_run.py` and `embedding_run.py` do the work in between.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar, TypeVar

from tuneship.contract.deployments import GONE, SERVING, DeploymentStatus
from tuneship.contract.errors import ApiError, DeploymentError, InternalError, ResourceNotFound
from tuneship.replicas.replica_link import NoReplica
from tuneship.service.answers.field_errors import field_error, with_names
from tuneship.service.context.context import Context
from tuneship.service.deployments.lookup import shown_deployment
from tuneship.service.generation.accounting import GenerationAccount, NoTurn
from tuneship.service.generation.routing import RoutingTarget, cached, cached_row
from tuneship.service.models.safeguards import SafeguardLost, check_served, is_within_reach
from tuneship.service.models.served_models import ServedModel, models_of
from tuneship.service.telemetry.in_flight import InFlightGeneration
from tuneship.serving.replica_client import (
    ReplicaLost,
    RequestTooLarge,
    ServingError,
    UnusableGrammar,
)
from tuneship.store.database import tables
from tuneship.store.database.rows import Row
from tuneship.store.records import job_records

R = TypeVar("R")

BEING_DELETED = "the deployment is being deleted"


class RoutedRun(ABC):
    """One request to a deployment."""

    # The word for what the model does, in errors.
    work: ClassVar[str]
    # The field that a request too large for the memory of a replica is refused by.
    too_large_param: ClassVar[str]
    # The field that a request whose grammar cannot be followed is refused by.
    grammar_param = "response_format"
    # Other names of fields than the main API's, by which they are refused.
    names: Mapping[str, str] = {}
    _deployment: Row
    _served: ServedModel
    _in_flight: InFlightGeneration

    def __init__(self, context: Context, target: RoutingTarget, started: float) -> None:
        """`started`: arrival time of the request, by `time.perf_counter`."""
        self._context = context
        self._parts = context.parts
        self._target = target
        self._started = started

    async def answer_as(self, make: Callable[[], R]) -> R:
        """Answer in the form that `make` gives to the answer: in a thread where that takes long."""
        await self.answer()
        if not self._is_long():
            return make()
        return await self._parts.threads.texts.run(self._context.client_id, make)

    @abstractmethod
    async def answer(self) -> object:
        """Run from the routing to the record. Raises the contract's errors."""

    @abstractmethod
    def _is_long(self) -> bool:
        """Whether writing the answer would hold up the event loop."""

    @abstractmethod
    def _note_request(self) -> None:
        """Note the request's facts for the span."""

    @asynccontextmanager
    async def _accounted(self) -> AsyncGenerator[GenerationAccount]:
        """Route, then record how the work inside ends; the work itself records its success."""
        context, target = self._context, self._target
        tracked = self._parts.in_flight.track(
            target.deployment_id, is_background=context.is_background
        )
        with with_names(self.names), tracked as self._in_flight:
            await self._route()
            replicas = self._deployment["current_replicas"] or 0
            account = GenerationAccount(context, target, self._started, replicas)
            context.headers["X-Deployment-ID"] = target.deployment_id
            try:
                self._check_can_serve()
                yield account
            except asyncio.CancelledError:
                account.cancelled()
                raise
            except Exception as error:
                account.failed(error)
                raise

    async def _route(self) -> None:
        """Read the deployment and its model. Raises `ResourceNotFound` if this caller may not use them."""
        context, target = self._context, self._target
        row = await cached_row(context, tables.deployments, target.deployment_id)
        if row is not None:
            # A job's `audit_logging` also holds for the answers of its model.
            names = [row["model_name"]]
            jobs = await cached(
                context,
                ("safeguards behind", row["model_name"]),
                lambda connection: job_records.security_settings_of(
                    connection, context.client_id, names
                ),
            )
            for job in jobs:
                context.audit_facts.touch(job)

        self._deployment = shown_deployment(context, row)
        if not is_within_reach(context, self._deployment):
            kind = "endpoint" if target.endpoint_id else "deployment"
            raise ResourceNotFound(f"there is no such {kind}")
        model = self._deployment["model_name"]
        self._served = await cached(
            context,
            ("model", model),
            lambda connection: models_of(context).served(connection, context.client_id, model),
        )
        # Only now is the deployment known to be the caller's, so the metrics may show this request as in flight.
        self._in_flight.accepted, self._in_flight.endpoint_id = self._started, target.endpoint_id
        self._note_request()

    def _check_can_serve(self) -> None:
        status = DeploymentStatus(self._deployment["status"])
        if status is DeploymentStatus.CREATING:
            text = "the deployment is still being created"
            raise DeploymentError(text, status=503, retry_after=1)
        if status not in SERVING:
            # A 500 would blame the model, and a 503 would ask the caller to try again.
            raise DeploymentError(BEING_DELETED if status in GONE else "the deployment has failed")
        # After a restart requests come before the keeper has checked every deployment, and each of them loads
        # its model.
        try:
            check_served(
                self._parts.capabilities, self._deployment["security_settings"], self._served
            )
        except SafeguardLost as error:
            raise DeploymentError(f"the model cannot be served: {error}") from error

    @asynccontextmanager
    async def _limited(self) -> AsyncGenerator[None]:
        """Give the work inside a time limit. Raises the contract's errors."""
        in_flight = self._in_flight
        try:
            async with asyncio.timeout(self._parts.settings.generate_timeout_s) as in_flight.limit:
                yield
        except (TimeoutError, ServingError) as error:
            raise self._contract_error(error) from None
        finally:
            in_flight.limit = None

    def _contract_error(self, error: Exception) -> ApiError:
        """Turn an error of the replicas, or the end of the time, into one of the contract's."""
        if isinstance(error, TimeoutError):
            if self._in_flight.is_ended:
                return DeploymentError(BEING_DELETED)
            has_waited = self._in_flight.is_background and self._in_flight.queued_since is not None
            return NoTurn() if has_waited else InternalError(f"the {self.work} took too long")
        if isinstance(error, NoReplica | ReplicaLost):
            text = f"the model's process ended during the {self.work}"
            if isinstance(error, NoReplica):
                text = "no replica of the model can answer now"
            return InternalError(text, status=503, retry_after=1)
        if isinstance(error, RequestTooLarge):
            return field_error(self.too_large_param, f"asks for too much: {error}", "out_of_range")
        if isinstance(error, UnusableGrammar):
            return field_error(self.grammar_param, str(error))
        return InternalError(f"the model failed during the {self.work}")
