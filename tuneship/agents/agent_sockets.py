"""Parts of all connections between services and agents: messages as bytes, who answers, and how silence is noticed."""

import asyncio
import hashlib
import json
import secrets
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from tuneship.agents.agent_protocol import SILENT_HEARTBEATS, USER_TIMEOUT_MS


def encoded(frame: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    return json.dumps(frame, separators=(",", ":")).encode() + b"\n"


def is_agent(connection: ssl.SSLObject, digest: str) -> bool:
    """Whether the peer of a connection is the agent whose certificate has this SHA-256."""
    certificate = connection.getpeercert(binary_form=True)
    if certificate is None:
        return False
    return secrets.compare_digest(hashlib.sha256(certificate).hexdigest(), digest)


class Silence:
    """Notices that an agent sends nothing any more: a dead node does not disconnect."""

    def __init__(self, heartbeat_s: float) -> None:
        """Begin as if it had just sent something. `heartbeat_s`: how often it sends something."""
        self._heartbeat_s = heartbeat_s
        # To be set with each message.
        self.has_heard = True

    async def begun(self) -> None:
        """Return when several heartbeats in a row have not come.

        They are counted by turns of the loop and not by the clock: a service that stood still has not been listening.
        """
        silent = 0
        while silent < SILENT_HEARTBEATS:
            await asyncio.sleep(self._heartbeat_s)
            silent = 0 if self.has_heard else silent + 1
            self.has_heard = False


def limit_silence(writer: asyncio.StreamWriter) -> None:
    """Have the kernel end the connection when the other end confirms nothing for seconds (on Linux)."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        stream = writer.get_extra_info("socket")
        stream.setsockopt(socket.IPPROTO_TCP, option, USER_TIMEOUT_MS)
