"""The HTTP server: uvicorn with a way of its own to accept connections, which keeps their number below a limit.

asyncio's way accepts whatever comes until the process has no descriptor left, then writes a traceback a second; it
waits a minute for the handshake of TLS. uvicorn offers neither limit.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any

import uvicorn

from tuneship.host.open_files import ConnectionLimits
from tuneship.service.common.log_budget import LogBudget
from tuneship.service.http.connections import Connection
from tuneship.service.http.forwarding import plain_address, source_of
from tuneship.service.http.middleware import KEYLESS
from tuneship.service.http.open_connections import OpenConnection, OpenConnections

# Connections that the kernel keeps for us until we accept them.
BACKLOG = 2048
# Connections accepted in one turn of the event loop: those that they replace are closed in the
# next one.
TOGETHER = 64
# After a connection could not be accepted.
PAUSE_S = 0.1
LOOK_EVERY_S = 1.0
REPORT_EVERY_S = 10.0
# Lines of one kind between two reports, of loggers to which a caller without a key can make the
# service write.
BUDGETS = {"asyncio": 1, "uvicorn.error": 1, KEYLESS: 10}

logger = logging.getLogger(__name__)


class HttpServer(uvicorn.Server):
    """Accepts connections while there is room, makes room where strangers take it, and ends what is overdue."""

    def __init__(
        self,
        config: uvicorn.Config,
        limits: ConnectionLimits,
        declared: Sequence[IPv4Network | IPv6Network],
        budgets: Mapping[str, int] = BUDGETS,
    ) -> None:
        """`declared`: proxies, which the limit by address does not hold for. `budgets`: as `BUDGETS`."""
        super().__init__(config)
        self.connections = OpenConnections(limits)
        self._declared = declared
        self._listeners: list[socket.socket] = []
        self._not_accepted = 0
        self._budgets = {name: LogBudget(lines) for name, lines in budgets.items()}
        self._looking: asyncio.TimerHandle | None = None
        self._reported = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application, then listen."""
        await super().startup([])
        if not self.started:
            return
        for name, budget in self._budgets.items():
            logging.getLogger(name).addFilter(budget)
        for listener in sockets or ():
            listener.listen(BACKLOG)
            listener.setblocking(False)
            self._listeners.append(listener)
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)
        self._look_after_all()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept nobody any more, then end the application."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
        self._listeners.clear()
        try:
            await super().shutdown(sockets)
        finally:
            if self._looking is not None:
                self._looking.cancel()
            for connection in self.connections:
                connection.cut()
            for name, budget in self._budgets.items():
                logging.getLogger(name).removeFilter(budget)

    def _accept(self, listener: socket.socket) -> None:
        """Called while connections wait."""
        for _ in range(TOGETHER):
            try:
                accepted, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor left, though we stay below the limit, or the caller's network is gone
                self._not_accepted += 1
                self.connections.make_room()
                self._pause(listener, PAUSE_S)
                return
            if not self._let_in(listener, accepted, address[0]):
                return

    def _pause(
        self,
        listener: socket.socket,
        wait_s: float,
        postponed: tuple[socket.socket, str] | None = None,
    ) -> None:
        """Accept nobody for a while, then go on with a connection that was accepted already."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(listener)
        loop.call_later(wait_s, self._go_on, listener, postponed)

    def _go_on(self, listener: socket.socket, postponed: tuple[socket.socket, str] | None) -> None:
        if listener not in self._listeners:  # the service ends
            if postponed is not None:
                postponed[0].close()
            return
        if postponed is None or self._let_in(listener, *postponed):
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _let_in(self, listener: socket.socket, accepted: socket.socket, host: str) -> bool:
        """False: it has to wait, and so have those behind it, until another one may be ended for it."""
        is_declared = self._is_declared(host)
        source = None if is_declared else source_of(host)
        replaced = self.connections.next_to_go(source)
        if replaced is not None and (wait_s := replaced.grace_s()) > 0:
            self._pause(listener, wait_s, (accepted, host))
            return False
        loop = asyncio.get_running_loop()
        connection = Connection(
            self.connections,
            is_declared=is_declared,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=loop,
        )
        if not self.connections.admit(connection, source):
            accepted.close()
            return True
        connection.opening = loop.create_task(self._open(accepted, connection))
        connection.opening.add_done_callback(lambda task: self._opened(task, accepted, connection))
        return True

    def _is_declared(self, host: str) -> bool:
        with suppress(ValueError):
            address = ip_address(plain_address(host))
            return any(address in network for network in self._declared)
        return False

    async def _open(self, accepted: socket.socket, connection: Connection) -> None:
        """Make the transport, which owns the socket from then on."""
        tls: dict[str, Any] = {}
        if self.config.ssl is not None:
            wait_s = connection.waits.head_s
            tls = {
                "ssl": self.config.ssl,
                "ssl_handshake_timeout": wait_s,
                "ssl_shutdown_timeout": wait_s,
            }
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(lambda: connection, accepted, **tls)

    def _opened(
        self, task: asyncio.Task[None], accepted: socket.socket, connection: Connection
    ) -> None:
        """One that broke off, or was ended, before it was open leaves nothing behind."""
        failure = None if task.cancelled() else task.exception()
        if task.cancelled() or failure is not None:
            self.connections.leave(connection)
            accepted.close()
        if failure is not None and not isinstance(failure, OSError):
            logger.error("a connection could not be opened", exc_info=failure)

    def _look_after_all(self) -> None:
        """Once a second."""
        self._looking = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_after_all)
        for connection in self.connections:
            _end_if_overdue(connection)
        if time.monotonic() - self._reported >= REPORT_EVERY_S:
            self._reported = time.monotonic()
            self._report()

    def _report(self) -> None:
        counted = self.connections
        ended, refused, failed = counted.evicted, counted.refused, self._not_accepted
        counted.evicted = counted.refused = self._not_accepted = 0
        if ended or refused or failed:
            text = "connections: %d are open; %d ended to make room, %d refused, %d not accepted"
            logger.warning(text, len(counted), ended, refused, failed)
        for budget in self._budgets.values():
            budget.report(logger)


def _end_if_overdue(connection: OpenConnection) -> None:
    """One that fails here must not keep the others open."""
    try:
        connection.end_if_overdue()
    except Exception:
        logger.exception("a connection could not be ended in order")
        connection.cut()
