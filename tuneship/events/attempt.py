"""One try to deliver one event: a connection of its own, a signed POST, and what came of it.

No proxy, no redirect, no connection used twice; of the answer only the status and `Retry-After` are looked at.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import cast

import certifi
import httpcore

from tuneship.events.addresses import ReceiverAddress, TargetRefused
from tuneship.events.connector import CheckedNetwork, Receivers
from tuneship.events.retry_schedule import retry_after

# For everything: name, connection, TLS, request, answer.
TIMEOUT_S = 15.0
# For one address of a name that has several.
CONNECT_S = 5.0
LONGEST_ANSWER = 64 << 10
READ_AWAY_S = 1.0
GONE = 410
USER_AGENT = "tuneship-webhooks/1"


@dataclass(frozen=True)
class DeliveryOutcome:
    """`failure` is None after a 2xx; else a word of ours. Nothing that the receiver wrote is kept."""

    failure: str | None
    status: int | None = None
    retry_after: timedelta | None = None

    @property
    def is_gone(self) -> bool:
        """The receiver asked never to be called again."""
        return self.status == GONE


class Sender:
    """Makes tries. `network` is where connections come from; `trust` says whose certificates are believed."""

    def __init__(
        self,
        receivers: Receivers,
        network: httpcore.AsyncNetworkBackend | None = None,
        trust: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """By default: real connections, the system's and certifi's authorities."""
        self._receivers = receivers
        own = cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())
        self._network = network or own
        self._trust = trust or default_trust()
        self._timeout_s = timeout_s

    async def send(
        self, url: str, headers: dict[str, str], body: bytes, now: datetime
    ) -> DeliveryOutcome:
        """One try; every failure is an outcome."""
        try:
            target = self._receivers.rules.target(url)
            async with asyncio.timeout(self._timeout_s):
                return await self._post(target, headers, body, now)
        except TargetRefused:
            return DeliveryOutcome("address_refused")
        except (TimeoutError, httpcore.TimeoutException):
            return DeliveryOutcome("timed_out")
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            return DeliveryOutcome("tls_failed" if _is_about_tls(error) else "connection_failed")

    async def _post(
        self, target: ReceiverAddress, headers: dict[str, str], body: bytes, now: datetime
    ) -> DeliveryOutcome:
        origin = (target.scheme.encode(), target.host.encode(), target.port)
        request = httpcore.Request(
            "POST",
            httpcore.URL(
                scheme=origin[0], host=origin[1], port=target.port, target=target.path.encode()
            ),
            headers={
                "Host": target.authority,
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                "User-Agent": USER_AGENT,
                "Connection": "close",
                **headers,
            },
            content=body,
            extensions={"timeout": {"connect": CONNECT_S}},
        )
        async with httpcore.AsyncHTTPConnection(
            httpcore.Origin(*origin),
            ssl_context=self._trust,
            network_backend=CheckedNetwork(self._receivers, target, self._network),
        ) as connection:
            response = await connection.handle_async_request(request)
            outcome = _outcome(response, now)
            await _read_away(response)
            return outcome


def _outcome(response: httpcore.Response, now: datetime) -> DeliveryOutcome:
    status = response.status
    if 200 <= status < 300:
        return DeliveryOutcome(None, status)
    failure = "redirected" if 300 <= status < 400 else "refused_by_receiver"
    given = {name.lower(): value for name, value in response.headers}.get(b"retry-after", b"")
    return DeliveryOutcome(failure, status, retry_after(given.decode("latin-1"), now))


async def _read_away(response: httpcore.Response) -> None:
    """Read a little of the answer, so that a well-behaved receiver sees no broken connection; the status stands."""
    size, stream = 0, cast("AsyncGenerator[bytes]", response.aiter_stream())
    with suppress(TimeoutError, httpcore.NetworkError, httpcore.ProtocolError):
        async with asyncio.timeout(READ_AWAY_S), aclosing(stream):
            async for block in stream:
                size += len(block)
                if size >= LONGEST_ANSWER:
                    return


def _is_about_tls(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def default_trust() -> ssl.SSLContext:
    """The system's authorities (`SSL_CERT_FILE` adds an own one) and certifi's, where a system brings none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
