"""With a certificate the service speaks TLS and nothing else."""

import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from tests.support.service.processes import Serve
from tuneship.cli.main import app
from tuneship.client import Client
from tuneship.contract.errors import ServiceUnreachable
from tuneship.settings import ClientSettings

TLS = ssl.TLSVersion


def certificate(folder: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for 127.0.0.1, and return the files of the certificate and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tuneship")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return files


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    files = certificate(tmp_path)
    options = ("--tls-certificate", str(files[0]), "--tls-key", str(files[1]))
    started = Serve(tmp_path / "data", *options)
    yield started
    started.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_only_tls_is_spoken_and_only_to_who_trusts_the_certificate(
    serve: Serve, tmp_path: Path
) -> None:
    assert serve.url.startswith("https://127.0.0.1:")
    settings = ClientSettings.from_credentials(serve.data_dir / "credentials.json")
    settings = settings.model_copy(update={"tries": 1})
    with pytest.raises(ServiceUnreachable), Client(settings) as distrustful:
        distrustful.models.list()
    trusting = settings.model_copy(update={"ca_file": tmp_path / "certificate.pem"})
    with Client(trusting) as client:
        assert client.models.list().models
    with pytest.raises(httpx.TransportError):
        httpx.get(serve.url.replace("https", "http") + "/healthz", trust_env=False)
    port = int(serve.url.rpartition(":")[2])
    assert [spoken(port, version) for version in (TLS.TLSv1_1, TLS.TLSv1_2, TLS.TLSv1_3)] == [
        False,
        True,
        True,
    ]


def spoken(port: int, version: TLS) -> bool:
    """Whether a client that knows only this TLS version can connect to the service."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers("ALL:@SECLEVEL=0")  # otherwise this side would refuse the old version
    context.minimum_version = context.maximum_version = version
    with socket.create_connection(("127.0.0.1", port), 120) as plain:
        try:
            with context.wrap_socket(plain) as spoken:
                return spoken.version() is not None
        except ssl.SSLError:
            return False


def test_a_certificate_without_its_key_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["serve", "--tls-certificate", str(tmp_path / "c.pem")])
    assert done.exit_code == 1
    assert "tls_certificate and tls_key belong together" in done.output


def test_a_certificate_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    files = "--tls-certificate", str(tmp_path / "c.pem"), "--tls-key", str(tmp_path / "c.pem")
    done = CliRunner().invoke(
        app, ["serve", "--port", "0", "--data-dir", str(tmp_path / "data"), *files]
    )
    assert done.exit_code == 1
    assert done.output.count("\n") == 1
    assert "the service cannot start" in done.output
