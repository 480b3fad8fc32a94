"""The HTTP server: uvicorn with its own accept loop, which keeps the number of connections below a limit.

asyncio accepts every connection until the process has no descriptor left, then writes a traceback a second, and it
waits a minute for a TLS handshake. uvicorn offers neither limit.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_address
from typing import Any

import uvicorn

from tuneship.service.http.forwarding import plain_address
from tuneship.service.http.middleware import KEYLESS
from tuneship.service.http.sockets.connections import Connection, ConnectionTimeouts
from tuneship.service.http.sockets.log_budget import LogBudget
from tuneship.service.http.sockets.open_connections import OpenConnections

# Connections that the kernel keeps for the service until it accepts them.
BACKLOG = 2048
# The pause after a connection could not be accepted.
PAUSE_S = 0.1
# Log lines of one kind between two reports, for loggers to which a caller without a key can make
# the service write.
BUDGETS = {"asyncio": 1, "uvicorn.error": 1, KEYLESS: 10}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerTiming:
    """The timeouts of connections, and how often the server checks them and reports, in seconds."""

    connection: ConnectionTimeouts = field(default_factory=ConnectionTimeouts)
    check_every_s: float = 1.0
    report_every_s: float = 10.0


class HttpServer(uvicorn.Server):
    """Accepts connections, ends keyless ones to make room for new ones, and ends what is overdue."""

    def __init__(
        self,
        config: uvicorn.Config,
        limit: int,
        declared: Sequence[IPv4Network | IPv6Network],
        budgets: Mapping[str, int] = BUDGETS,
        timing: ServerTiming | None = None,
    ) -> None:
        """`limit`: of open connections. `declared`: proxies. `budgets`: as `BUDGETS`."""
        super().__init__(config)
        self.connections = OpenConnections(limit)
        self._declared = declared
        self._timing = timing or ServerTiming()
        self._listeners: list[socket.socket] = []
        self._not_accepted = 0
        self._budgets = {name: LogBudget(lines) for name, lines in budgets.items()}
        self._next_check: asyncio.TimerHandle | None = None
        self._reported_at = 0.0

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
            self._listen(listener)
        self._check_connections()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, then end the application."""
        for listener in self._listeners:
            asyncio.get_running_loop().remove_reader(listener)
        self._listeners.clear()
        try:
            await super().shutdown(sockets)
        finally:
            if self._next_check is not None:
                self._next_check.cancel()
            for connection in self.connections:
                connection.cut()
            for name, budget in self._budgets.items():
                logging.getLogger(name).removeFilter(budget)

    def _listen(self, listener: socket.socket) -> None:
        if listener in self._listeners:  # the service may have ended during a pause
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accept one of the connections that wait. Called by the event loop."""
        loop = asyncio.get_running_loop()
        try:
            accepted, address = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            # No descriptor is left in spite of the limit, or the caller's network is gone.
            self._not_accepted += 1
            self.connections.make_room()
            loop.remove_reader(listener)
            loop.call_later(PAUSE_S, self._listen, listener)
            return
        peer = ip_address(plain_address(address[0]))
        is_declared = any(peer in network for network in self._declared)
        connection = Connection(
            self.connections,
            is_declared=is_declared,
            timeouts=self._timing.connection,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=loop,
        )
        if self.connections.admit(connection, has_key=is_declared):
            self._open(loop, accepted, connection)
        else:
            accepted.close()

    def _open(
        self, loop: asyncio.AbstractEventLoop, accepted: socket.socket, connection: Connection
    ) -> None:
        """Make the transport in a task; it owns the socket from then on."""
        tls: dict[str, Any] = {}
        if self.config.ssl is not None:
            tls["ssl"] = self.config.ssl
            tls["ssl_handshake_timeout"] = connection.timeouts.head_s
            tls["ssl_shutdown_timeout"] = connection.timeouts.head_s

        async def connect() -> None:
            await loop.connect_accepted_socket(lambda: connection, accepted, **tls)

        def opened(task: asyncio.Task[None]) -> None:
            # A connection that broke off, or was ended, before it was open leaves nothing behind.
            failure = None if task.cancelled() else task.exception()
            if task.cancelled() or failure is not None:
                self.connections.leave(connection)
                accepted.close()
            if failure is not None and not isinstance(failure, OSError):
                logger.error("a connection could not be opened", exc_info=failure)

        connection.opening = loop.create_task(connect())
        connection.opening.add_done_callback(opened)

    def _check_connections(self) -> None:
        """End the connections that are overdue, report now and then, and schedule the next check."""
        loop, timing = asyncio.get_running_loop(), self._timing
        self._next_check = loop.call_later(timing.check_every_s, self._check_connections)
        for connection in self.connections:
            try:
                connection.end_if_overdue()
            except Exception:  # the other connections must be checked too
                logger.exception("a connection could not be ended in order")
                connection.cut()
        if time.monotonic() - self._reported_at < timing.report_every_s:
            return

        self._reported_at = time.monotonic()
        counted = self.connections
        ended, refused, failed = counted.evicted, counted.refused, self._not_accepted
        counted.evicted = counted.refused = self._not_accepted = 0
        if ended or refused or failed:
            text = "connections: %d are open; %d ended to make room, %d refused, %d not accepted"
            logger.warning(text, len(counted), ended, refused, failed)
        for budget in self._budgets.values():
            budget.report(logger)
