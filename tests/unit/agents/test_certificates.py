"""Services and agents know each other by certificates: of the service's authority, and by the digest of the agent's."""

import asyncio
import ssl
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.support.waiting import until_disconnected
from tuneship.agents.agent_sockets import is_agent
from tuneship.agents.certificates import AgentAuthority, agent_context

AUTHORITY = AgentAuthority(b"a" * 32)
STRANGER = AgentAuthority(b"b" * 32)
LONG = timedelta(days=365)


def now() -> datetime:
    return datetime.now(UTC)


def talk(client: ssl.SSLContext, digest: str | None = None) -> tuple[bytes, bool]:
    """Connect to an agent of AUTHORITY; return its words, and whether it is the one with this digest (its own)."""

    async def run() -> tuple[bytes, bool]:
        context, own = agent_context(AUTHORITY.trusted)

        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client)
        try:
            found = is_agent(writer.get_extra_info("ssl_object"), digest or own)
            assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
            return await reader.read(), found
        except ssl.SSLError:  # the agent refused the certificate
            return b"", False
        finally:
            writer.transport.abort()
            await until_disconnected(server)

    return asyncio.run(run())


def test_a_service_is_let_in_and_finds_its_agent() -> None:
    assert talk(AUTHORITY.client_context(now())) == (b"hello", True)


def test_every_service_with_the_master_key_has_the_same_authority() -> None:
    assert AgentAuthority(b"a" * 32).trusted == AUTHORITY.trusted != STRANGER.trusted


def test_an_agent_that_was_not_started_for_it_is_noticed() -> None:
    _, other = agent_context(AUTHORITY.trusted)
    assert talk(AUTHORITY.client_context(now()), other) == (b"hello", False)


@pytest.mark.parametrize("begin", [now() - LONG, now() + LONG], ids=["expired", "not yet"])
def test_a_certificate_holds_for_a_day(begin: datetime) -> None:
    assert talk(AUTHORITY.client_context(begin))[0] == b""


def test_strangers_are_not_let_in() -> None:
    assert talk(STRANGER.client_context(now()))[0] == b""
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.check_hostname = False
    nobody.verify_mode = ssl.CERT_NONE
    assert talk(nobody)[0] == b""


def test_no_key_is_written_unencrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    written = list[bytes]()
    write = Path.write_bytes

    def keep(path: Path, content: bytes) -> int:
        written.append(content)
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", keep)
    AUTHORITY.client_context(now())
    agent_context(AUTHORITY.trusted)
    assert len(written) == 2
    assert all(b"BEGIN ENCRYPTED PRIVATE KEY" in content for content in written)
    assert not any(b"BEGIN PRIVATE KEY" in content for content in written)
    assert list(tmp_path.iterdir()) == []
