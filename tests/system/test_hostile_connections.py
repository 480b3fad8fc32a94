"""Thousands of connections without a key try to stay open; clients with a key are served, and all the others end."""

import resource
import socket
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.service.http.test_tls import certificate
from tests.support.repeats import variants
from tests.support.service.processes import Serve, start
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.slow
NUMBER = 2000
FEW_FILES = 512
# Number of bytes that 2,000 hostile connections may add to the log.
LOG_BYTES = 32 << 10
# Texts that mark the good client's requests in the log.
OURS = (b" /v1/models 200 ", b" /v1/datasets 200 ", b" /healthz 200 ")
HALF_A_HEAD = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Long: "
BODY = b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"
# By kind of attack: the bytes that a connection sends first, and those that it sends once a second.
KINDS = {
    "slow heads": (HALF_A_HEAD, b"x"),
    "slow bodies": (BODY % b"/healthz", b"x"),
    "bodies after a refused key": (BODY % b"/v1/fine-tuning/jobs", b"x"),
    "silence": (b"", b""),
}


@dataclass
class Attack:
    """Connections from this machine that go on until the service has ended them."""

    address: tuple[str, int]
    begin: bytes
    go_on: bytes
    connections: list[socket.socket] = field(default_factory=list[socket.socket])
    ended: int = 0
    is_stopped: bool = False

    def connect(self, number: int) -> None:
        for _ in range(number):
            if self.is_stopped:
                return
            connection = socket.socket()
            connection.settimeout(PATIENCE_S)
            connection.connect(self.address)
            connection.setblocking(False)
            self.connections.append(connection)
            self._send(connection, self.begin)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        with suppress(OSError):  # it has been closed; `_is_over` notices that
            connection.send(data)

    def run(self, number: int) -> None:
        """Open `number` connections and send on each once a second until the service has ended it; runs in a thread."""
        self.connect(number)
        while self.connections and not self.is_stopped:
            for connection in tuple(self.connections):
                if self._is_over(connection):
                    self.connections.remove(connection)
                    connection.close()
                    self.ended += 1
                else:
                    self._send(connection, self.go_on)
            time.sleep(1)

    def stop(self) -> None:
        """Stop the attack and close the connections that are left, in case a test failed."""
        self.is_stopped = True
        for connection in self.connections:
            connection.close()

    def _is_over(self, connection: socket.socket) -> bool:
        try:
            while connection.recv(1 << 16):
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True


class GoodClient:
    """A client with a key that also asks for the health, on new connections and on one that is kept."""

    def __init__(self, serve: Serve, ca_file: Path | None = None) -> None:
        self._headers = serve.headers
        verify: Any = False if ca_file is None else ssl.create_default_context(cafile=str(ca_file))
        self._options = {
            "base_url": serve.url,
            "verify": verify,
            "trust_env": False,
            "timeout": PATIENCE_S,
        }
        # Only the service may close the kept connection.
        limits = httpx.Limits(keepalive_expiry=PATIENCE_S)
        self.kept = httpx.Client(**self._options, limits=limits)
        self.ports = set[int]()

    def seconds_of_one_round(self) -> float:
        begun = time.monotonic()
        for path, headers in (("/v1/models", self._headers), ("/healthz", {})):
            with httpx.Client(**self._options) as new:
                assert new.get(path, headers=headers).status_code == 200
        answer = self.kept.get("/v1/datasets", headers=self._headers)
        assert answer.status_code == 200
        stream = answer.extensions["network_stream"]
        self.ports.add(stream.get_extra_info("client_addr")[1])
        return (time.monotonic() - begun) / 3


def sockets_of(serve: Serve) -> int:
    found = 0
    for one in Path(f"/proc/{serve.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found += str(one.readlink()).startswith("socket:")
    return found


@contextmanager
def opening_many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NUMBER + 500:
        pytest.skip("this machine does not let a test open so many connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def withstand(
    serve: Serve, good: GoodClient, kind: str, number: int, record: Callable[[str, object], None]
) -> None:
    """Attack the service, send good requests meanwhile, and check what is left afterwards."""
    begin, go_on = KINDS.get(kind, (b"", b""))
    host, _, port = serve.url.partition("://")[2].rpartition(":")
    attack = Attack((host, int(port)), begin, go_on)
    before = [good.seconds_of_one_round() for _ in range(10)]
    sockets, logged = sockets_of(serve), serve.log.stat().st_size
    good.ports.clear()
    begun = time.monotonic()
    going_on = threading.Thread(target=attack.run, args=(number,), daemon=True)
    going_on.start()
    most, during = 0, list[float]()
    try:
        while going_on.is_alive():
            assert time.monotonic() - begun < PATIENCE_S, f"{len(attack.connections)} never ended"
            during.append(good.seconds_of_one_round())
            most = max(most, sockets_of(serve))
    finally:
        attack.stop()
        going_on.join()
        good.kept.close()
    took = time.monotonic() - begun
    assert attack.ended == number
    assert len(good.ports) == 1, f"{max(during)} s: a connection in use, with a key, was ended"
    until(lambda: sockets_of(serve) < sockets)  # the count before included the kept connection
    log = serve.log.read_bytes()[logged:]
    assert b"Traceback" not in log
    grown = sum(len(line) for line in log.splitlines() if not any(one in line for one in OURS))
    assert grown < LOG_BYTES, log[-2000:]
    figures = (
        f"{number} connections, {kind}: all ended after {took:.0f} s; a request took"
        f" {1000 * statistics.median(before):.0f} ms before, {1000 * statistics.median(during):.0f} ms"
        f" during (slowest of {len(during)}: {1000 * max(during):.0f} ms); at most {most} sockets,"
        f" {sockets_of(serve)} afterwards; log +{grown} bytes"
    )
    record("figures", figures)
    print(figures)  # noqa: T201 - the figures are for docs/performance.md


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    made = Serve(tmp_path_factory.mktemp("hostile") / "data")
    yield made
    made.stop()


@pytest.mark.parametrize("kind", variants(KINDS))
def test_two_thousand_connections_hold_nobody_up(
    serve: Serve, kind: str, record_property: Callable[[str, object], None]
) -> None:
    with opening_many_files():
        withstand(serve, GoodClient(serve), kind, NUMBER, record_property)


@pytest.mark.soak
def test_two_thousand_idle_handshakes_of_tls_hold_nobody_up(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    files = certificate(tmp_path)
    options = ("--tls-certificate", str(files[0]), "--tls-key", str(files[1]))
    serve = Serve(tmp_path / "data", *options)
    try:
        with opening_many_files():
            good = GoodClient(serve, tmp_path / "certificate.pem")
            withstand(serve, good, "idle handshakes of TLS", NUMBER, record_property)
    finally:
        serve.stop()


def few_files(module: str, *arguments: str, **options: Any) -> Any:
    """Start a service that may open few files, and only half of them until it raises its limit."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_FILES // 2, FEW_FILES))

    return start(module, *arguments, preexec_fn=limit, **options)


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["slow heads", "bodies after a refused key"])
def test_more_connections_than_descriptors_hold_nobody_up(
    tmp_path: Path, kind: str, record_property: Callable[[str, object], None]
) -> None:
    serve = Serve(tmp_path / "data", starter=few_files)
    try:
        limits = Path(f"/proc/{serve.process.pid}/limits").read_text()
        (line,) = [one for one in limits.splitlines() if one.startswith("Max open files")]
        assert line.split()[3:5] == [str(FEW_FILES)] * 2, "the service raises what it may"
        with opening_many_files():
            withstand(serve, GoodClient(serve), kind, 3 * FEW_FILES, record_property)
        until(lambda: "connections: " in serve.log.read_text())
        assert " 0 refused, 0 not accepted" in serve.log.read_text()
    finally:
        serve.stop()
