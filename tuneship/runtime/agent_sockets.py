"""Parts of a connection that services and agents share: messages as bytes, and the kernel's own limit for silence."""

import asyncio
import json
import socket
from collections.abc import Mapping
from typing import Any

from tuneship.runtime.agent_protocol import USER_TIMEOUT_MS


def encoded(frame: Mapping[str, Any]) -> bytes:
    """A message as bytes."""
    return json.dumps(frame, separators=(",", ":")).encode() + b"\n"


def limit_silence(writer: asyncio.StreamWriter) -> None:
    """Have the kernel end the connection when the other end confirms nothing for seconds (on Linux)."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        stream = writer.get_extra_info("socket")
        stream.setsockopt(socket.IPPROTO_TCP, option, USER_TIMEOUT_MS)
