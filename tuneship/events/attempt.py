"""Makes one attempt to deliver an event: a new connection, a signed POST, and its outcome.

It uses no proxy, follows no redirect and never reuses a connection. Only the status and `Retry-After` of the response
are used.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Self, cast

import certifi
import httpcore

from tuneship.events.addresses import ReceiverAddress, TargetRefused
from tuneship.events.connector import CheckedNetwork, Receivers
from tuneship.events.retry_schedule import retry_after

# Limit for a whole attempt: name resolution, connection, TLS, request and response.
TIMEOUT_S = 15.0
# Limit for connecting to one address, as a name may have several.
CONNECT_S = 5.0
# How much of a response body is read, and for how long.
MAX_BODY_BYTES = 64 << 10
READ_BODY_S = 1.0
GONE = 410
USER_AGENT = "tuneship-webhooks/1"


@dataclass(frozen=True)
class DeliveryOutcome:
    """The outcome of an attempt: `failure` is None after a 2xx, else one of our codes, never the receiver's text."""

    failure: str | None
    status: int | None = None
    retry_after: timedelta | None = None

    @classmethod
    def of(cls, response: httpcore.Response, now: datetime) -> Self:
        """The outcome for a response's status and headers."""
        status = response.status
        if 200 <= status < 300:
            return cls(None, status)
        failure = "redirected" if 300 <= status < 400 else "refused_by_receiver"
        header = {name.lower(): value for name, value in response.headers}.get(b"retry-after", b"")
        return cls(failure, status, retry_after(header.decode("latin-1"), now))

    @property
    def is_gone(self) -> bool:
        """Whether the receiver asked never to be called again."""
        return self.status == GONE


class Sender:
    """Sends events to receivers."""

    def __init__(
        self,
        receivers: Receivers,
        network: httpcore.AsyncNetworkBackend | None = None,
        trust: ssl.SSLContext | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Send through `network` and trust the certificate authorities of `trust`.

        The defaults are real connections, and the authorities of the system and of certifi.
        """
        self._receivers = receivers
        own = cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())
        self._network = network or own
        self._trust = trust or default_trust()
        self._timeout_s = timeout_s

    async def send(
        self, url: str, headers: dict[str, str], body: bytes, now: datetime
    ) -> DeliveryOutcome:
        """Make one attempt; a failure is returned as an outcome, not raised."""
        try:
            target = self._receivers.rules.target(url)
            async with asyncio.timeout(self._timeout_s):
                return await self._post(target, headers, body, now)
        except TargetRefused:
            return DeliveryOutcome("address_refused")
        except (TimeoutError, httpcore.TimeoutException):
            return DeliveryOutcome("timed_out")
        except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
            # httpcore hides what failed beneath; the causes distinguish TLS from the network.
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, ssl.SSLError):
                cause = cause.__cause__ or cause.__context__
            return DeliveryOutcome("connection_failed" if cause is None else "tls_failed")

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
            outcome = DeliveryOutcome.of(response, now)

            # A little of the body is read, so that well-behaved receivers see no broken connection. It cannot change
            # the outcome any more.
            size, stream = 0, cast("AsyncGenerator[bytes]", response.aiter_stream())
            with suppress(TimeoutError, httpcore.NetworkError, httpcore.ProtocolError):
                async with asyncio.timeout(READ_BODY_S), aclosing(stream):
                    async for block in stream:
                        size += len(block)
                        if size >= MAX_BODY_BYTES:
                            break
            return outcome


def default_trust() -> ssl.SSLContext:
    """Trust the system's authorities, those in `SSL_CERT_FILE`, and certifi's, because some systems have no
    authorities.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
