"""Clients that create endpoints all the time through a played balancer in front of the members of a cluster."""

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count

import httpx

from tests.support.cluster.cluster_members import Members
from tests.support.faults.repeating import repeating
from tuneship.client import Client
from tuneship.contract.endpoints import EndpointCreate
from tuneship.contract.errors import TuneshipError


class BalancedTransport(httpx.BaseTransport):
    """Deals requests out to the members, and passes on to the next one what a member takes no connection for."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = [httpx.URL(address) for address in addresses]
        self._turns = count()
        self._http = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        first = next(self._turns)
        for turn in range(first, first + len(self._addresses)):
            address = self._addresses[turn % len(self._addresses)]
            request.url = request.url.copy_with(host=address.host, port=address.port)
            try:
                return self._http.handle_request(request)
            except httpx.ConnectError as error:
                refused = error
        raise refused

    def close(self) -> None:
        self._http.close()


@dataclass(frozen=True)
class AcknowledgedWrite:
    """One create and its answer; the times are those of `time.monotonic`."""

    endpoint: str
    began: float
    ended: float


class MemberWriters:
    """Threads that create endpoints through a balancer, each with its own idempotency key."""

    def __init__(self, members: Members, deployment: str, number: int, tries: int) -> None:
        """`tries`: how often the client sends a create, at most."""
        self._members = members
        self._deployment = deployment
        self._number = number
        transport = BalancedTransport(members.addresses)
        self._client = Client(members.clients[0].settings, transport).with_options(tries=tries)
        self.acknowledged: list[AcknowledgedWrite] = []
        self.failures: list[TuneshipError] = []

    @contextmanager
    def at_work(self, pause_s: float) -> Iterator[None]:
        """Let them work meanwhile; at the end every create that was begun has its answer."""
        with closing(self._client), repeating(*[self._create] * self._number, pause_s=pause_s):
            yield

    def _create(self) -> None:
        began = time.monotonic()
        wanted = EndpointCreate(name=secrets.token_hex(16), deployment_id=self._deployment)
        try:
            made = self._client.endpoints.create(wanted).id
        except TuneshipError as error:
            self.failures.append(error)
        else:
            self.acknowledged.append(AcknowledgedWrite(made, began, time.monotonic()))

    def lost_and_doubled(self) -> tuple[int, int]:
        """How many acknowledged creates are not stored, and how many stored ones are too many."""
        stored = self._members.run("select id, name from endpoints")
        lost = {one.endpoint for one in self.acknowledged} - {row.id for row in stored}
        return len(lost), len(stored) - len({row.name for row in stored})
