"""The HTTP server of a service: it says where it answers, drains after a signal, and ends in any case."""

import asyncio
import faulthandler
import gc
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from tuneship.host.durable import write_private
from tuneship.host.guard import Guard
from tuneship.host.process_start import process_start
from tuneship.host.systemd import notify
from tuneship.service.access.api_keys import key_id
from tuneship.service.context.parts import Parts
from tuneship.service.http.sockets.connections import MAX_HEAD_BYTES, Connection
from tuneship.service.http.sockets.server import HttpServer
from tuneship.settings import ServiceSettings
from tuneship.store.records.audit import AuditRecord

logger = logging.getLogger(__name__)

GUARD_AFTER_S = 1.0


def server_config(app: Any, settings: ServiceSettings) -> uvicorn.Config:
    """The configuration of the HTTP server, without the features that the boundary has itself.

    TLS is Python's default for servers: 1.2 and newer. Only a declared proxy's X-Forwarded-For is trusted.
    """
    return uvicorn.Config(
        app,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=[str(network) for network in settings.trusted_proxies],
        log_config=None,
        access_log=False,
        server_header=False,
        http=Connection,
        ws="none",
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        timeout_graceful_shutdown=1,  # after the drain: requests that still run are cut off
    )


class ServiceServer(HttpServer):
    """Prints its URL when it accepts requests, and after a signal drains: answers 503 until the last one is done."""

    def __init__(self, config: uvicorn.Config, parts: Parts, limit: int) -> None:
        super().__init__(config, limit, parts.settings.trusted_proxies)
        self._parts = parts
        self._drains_at: float | None = None
        self._drained_by: float | None = None
        self._guard: Guard | None = None
        self._wake: Callable[[], object] = lambda: None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - uvicorn's own
        """Begin the drain at the first signal, after its notice, and end it at the second.

        A signal within the notice ends only that. Should the event loop itself be stuck, the stacks of all threads go
        to the log and the process exits with 1.
        """
        timing, drain = self._parts.timing, self._parts.drain
        notice_s = 0.0 if drain.is_announced else self._parts.settings.notice_s
        drain_s = 0 if drain.has_begun else timing.drain_s
        faulthandler.dump_traceback_later(notice_s + drain_s + timing.rest_s, exit=True)
        notify("STOPPING=1")
        if notice_s:
            drain.is_announced = True
            self._drains_at = time.monotonic() + notice_s
        else:
            self._drain(drain_s)
        self._wake()

    async def main_loop(self) -> None:
        """Look once a second, and ten times a second while the service ends."""
        loop, signalled, counter = asyncio.get_running_loop(), asyncio.Event(), 0
        self._wake = partial(loop.call_soon_threadsafe, signalled.set)
        while not await self.on_tick(counter):
            if self._drains_at is None and self._drained_by is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await signalled.wait()
                counter += 10
            else:
                await asyncio.sleep(0.1)
                counter += 1

    def _drain(self, drain_s: float) -> None:
        self._drains_at = None
        self._parts.drain.begin()
        self._drained_by = time.monotonic() + drain_s

    async def on_tick(self, counter: int) -> bool:
        """Return whether to end. `counter` counts tenths of a second."""
        if counter % 10 == 0:
            notify("WATCHDOG=1")
            if self._guard is not None and not self._guard.beat():
                logger.warning("the process that guards this one has ended")
                self._guard = None
        if self._drains_at is not None and time.monotonic() > self._drains_at:
            self._drain(self._parts.timing.drain_s)
        if self._drained_by is not None and (
            not self.server_state.tasks or time.monotonic() > self._drained_by
        ):
            self.should_exit = True
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            # What is there by now stays: the garbage collector need not look at it again.
            gc.freeze()
            timing, notice_s = self._parts.timing, self._parts.settings.notice_s
            # After the timer of `handle_exit`, which works while Python's lock is not held.
            end_s = notice_s + timing.drain_s + timing.rest_s + GUARD_AFTER_S
            self._guard = Guard(timing.stalled_s, end_s)
            url = self._parts.public_url
            record = {"url": url, "pid": os.getpid(), "started": process_start(os.getpid())}
            file = self._parts.settings.data_dir / "service.json"
            write_private(file, json.dumps(record) + "\n")
            notify("READY=1")
            sys.stdout.write(f"ready {url}\n")
            # Never into a log, a journal or a pipe.
            if sys.stdout.isatty() and self._parts.settings.console:
                sys.stdout.write(_console_link(self._parts))
            sys.stdout.flush()


def _console_link(parts: Parts) -> str:
    """A line with a link for whoever has started the service; none where the first key is elsewhere."""
    try:
        text = (parts.settings.data_dir / "credentials.json").read_text()
        kept: dict[str, str] = json.loads(text)
        client_id, key = kept["client_id"], kept["api_key"]
    except (OSError, ValueError, KeyError):
        return ""
    identifier, now = key_id(key) or "", parts.clock()
    made = (client_id, identifier, "create_sign_in_link", None, 200, "", "")
    with parts.database.write(client_id) as connection:
        url, _ = parts.sessions.new_link(connection, client_id, identifier, parts.public_url)
        parts.audit.add(connection, AuditRecord(now, *made))
    return f"sign in to the console (works once, for 10 minutes): {url}\n"
