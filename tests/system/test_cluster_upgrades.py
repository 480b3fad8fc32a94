"""Three members are upgraded, one by one, under a steady load: from 26.12.0, and to the next version."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import count, cycle
from pathlib import Path
from statistics import quantiles

import httpx
import pytest

from tests.support.cluster.cluster_members import PROMPT, Members
from tests.support.databases.other_versions import first_release, next_version
from tests.support.databases.postgres_cluster import Cluster
from tests.support.service.processes import Starter, running_deployment, start
from tests.support.waiting import until
from tuneship.client import Client
from tuneship.contract.endpoints import EndpointCreate
from tuneship.contract.errors import TuneshipError
from tuneship.store.database.database import HEAD

pytestmark = [pytest.mark.soak, pytest.mark.postgres]

BASE = "tuneship-tiny"
RATE_PER_S = 50
AT_ONCE = 32
# A member serves this long after SIGTERM, and is asked so often whether it is about to end.
NOTICE_S, CHECK_EVERY_S = 5, 0.5


@pytest.fixture
def members(tmp_path: Path, postgres: Cluster, bucket: str) -> Iterator[Members]:
    limits = {"generate_requests_per_minute": "0"}
    with closing(
        Members(tmp_path, postgres.blank_database(), bucket, postgres, **limits)
    ) as members:
        yield members


class CheckingBalancer(httpx.BaseTransport):
    """Deals requests out to the members whose `/readyz` says so, and passes on what a member takes no connection for.

    It knows no more of them than any balancer does.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = [httpx.URL(address) for address in addresses]
        self._ready = set(self._addresses)
        self._turns = count()
        self._http = httpx.HTTPTransport(limits=httpx.Limits(max_keepalive_connections=AT_ONCE))
        self._is_over = threading.Event()

    @contextmanager
    def checking(self) -> Iterator[None]:
        """Ask the members meanwhile."""
        checks = threading.Thread(target=self._check)
        checks.start()
        try:
            yield
        finally:
            self._is_over.set()
            checks.join()
            self._http.close()

    def _check(self) -> None:
        while not self._is_over.wait(CHECK_EVERY_S):
            self._ready = {address for address in self._addresses if self._is_ready(address)}

    @staticmethod
    def _is_ready(address: httpx.URL) -> bool:
        try:
            return httpx.get(address.join("/readyz"), trust_env=False).is_success
        except httpx.TransportError:
            return False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        first = next(self._turns)
        turns = [self._addresses[(first + n) % len(self._addresses)] for n in range(3)]
        refused: httpx.ConnectError | None = None
        for address in sorted(turns, key=lambda one: one not in self._ready):
            request.url = request.url.copy_with(host=address.host, port=address.port)
            try:
                return self._http.handle_request(request)
            except httpx.ConnectError as error:
                refused = error
        assert refused is not None
        raise refused


class SteadyLoad:
    """Requests of four kinds, so many a second whatever becomes of those before."""

    def __init__(self, client: Client, deployment: str) -> None:
        self.created: list[str] = []
        self.durations_s: list[float] = []
        self.failures: list[TuneshipError] = []
        self._client = client
        self._deployment = deployment
        self._is_over = threading.Event()

    @contextmanager
    def offered(self) -> Iterator[None]:
        """Send them meanwhile; at the end all are answered."""
        with ThreadPoolExecutor(AT_ONCE + 1) as threads:
            sending = threads.submit(self._send, threads)
            try:
                yield
            finally:
                self._is_over.set()
                sending.result()

    def _send(self, threads: ThreadPoolExecutor) -> None:
        began = time.monotonic()
        for number, kind in zip(count(1), cycle(self._kinds()), strict=False):
            threads.submit(self._try, kind)
            if self._is_over.wait(max(0.0, began + number / RATE_PER_S - time.monotonic())):
                return

    def _kinds(self) -> Sequence[Callable[[], object]]:
        return (
            self._create,
            lambda: self._client.deployments.generate(self._deployment, PROMPT),
            lambda: self._client.deployments.get(self._deployment),
            lambda: self._client.endpoints.list(limit=5),
        )

    def _create(self) -> None:
        wanted = EndpointCreate(name=secrets.token_hex(16), deployment_id=self._deployment)
        self.created.append(self._client.endpoints.create(wanted).id)

    def _try(self, ask: Callable[[], object]) -> None:
        began = time.monotonic()
        try:
            ask()
        except TuneshipError as error:
            self.failures.append(error)
        else:
            self.durations_s.append(time.monotonic() - began)

    def goes_on(self) -> None:
        """Wait for another second's answers."""
        before = len(self.durations_s)
        until(lambda: self.failures or len(self.durations_s) > before + RATE_PER_S)


@pytest.mark.parametrize("rounds", [1, 10])
def test_restarts_and_upgrades_refuse_nothing_at_fifty_requests_a_second(
    members: Members, tmp_path: Path, rounds: int
) -> None:
    """In every other round the members go back, each to the version before."""
    newer = next_version(tmp_path / "next", works_with=HEAD)
    members.start(NOTICE_S)
    _upgrade(members, [start if number % 2 else newer for number in range(rounds)])


def test_members_of_26_12_0_are_upgraded_at_fifty_requests_a_second(
    members: Members, tmp_path: Path
) -> None:
    """They then go back, and are upgraded once more."""
    older = first_release(tmp_path / "26.12.0")
    if older is None:
        pytest.skip("this checkout has no history of 26.12.0")
    members.start(NOTICE_S, starter=older)
    _upgrade(members, [start, older, start])


def _upgrade(members: Members, versions: Sequence[Starter]) -> None:
    """Restart the members, one by one, with each version; a steady load meanwhile loses nothing."""
    deployment = running_deployment(members.clients[0], "d", BASE)
    balancer = CheckingBalancer(members.addresses)
    client = Client(members.clients[0].settings, balancer).with_options(tries=1)
    load = SteadyLoad(client, deployment)
    began = time.monotonic()
    with balancer.checking(), load.offered():
        for version in versions:
            for serve in members.serves:
                load.goes_on()
                serve.stop()
                serve.starter = version
                serve.start()
        load.goes_on()
    rate = len(load.durations_s) / (time.monotonic() - began)
    *_, p95, _, _, _, p99 = (1000 * duration for duration in quantiles(load.durations_s, n=100))
    print(  # noqa: T201 - the figures of the run
        f"{len(versions)} rounds: {len(load.durations_s)} answers, {rate:.0f} a second, p95 {p95:.0f} ms,"
        f" p99 {p99:.0f} ms, {len(load.failures)} failed"
    )
    assert load.failures == []
    for each in members.clients:
        assert {endpoint.id for endpoint in each.endpoints.iterate()} == {*load.created}
