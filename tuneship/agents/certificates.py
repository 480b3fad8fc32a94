"""Certificates between the service and its agents: an authority of the service's own, and agents known by a digest.

Nothing is stored: the authority's key is derived from the master key, so every service with that key has the same one.
A service shows a certificate of the authority, made for each connection; an agent shows one that it made itself when
it started, and the service accepts only that one, by its digest. Both speak TLS 1.3.

Loading X.509 takes some 20 ms, which a service without agents does not spend: it does not import this module.
"""

import hashlib
import secrets
import ssl
import tempfile
from base64 import b64decode, b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# Purpose of the secret that the authority's key is derived from (`derived_secret`).
PURPOSE = "agents"
CLIENT_HOURS = 24
# Clocks of nodes differ a little.
CLOCKS_DIFFER = timedelta(hours=1)
# These end with their key, not at a date; X.509 writes it so (RFC 5280, 4.1.2.5).
BEGINNING, NO_END = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


class AgentAuthority:
    """Signs the certificates that identify the service to its agents."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: 32 bytes, derived from the master key for `PURPOSE`."""
        self._key = Ed25519PrivateKey.from_private_bytes(secret)
        name = _name("tuneship agents")
        builder = _certificate(name, name, self._key, BEGINNING, NO_END)
        ends = x509.BasicConstraints(ca=True, path_length=0)
        self._certificate = builder.add_extension(ends, critical=True).sign(self._key, None)

    @property
    def trusted(self) -> str:
        """The authority's certificate for an agent's command line; it is no secret, and always the same."""
        return b64encode(self._certificate.public_bytes(serialization.Encoding.DER)).decode()

    def client_context(self, now: datetime) -> ssl.SSLContext:
        """Make TLS settings with a new certificate for connections to agents; see `agent_sockets.is_agent`."""
        key = Ed25519PrivateKey.generate()
        begin, end = now - CLOCKS_DIFFER, now + timedelta(hours=CLIENT_HOURS)
        builder = _certificate(
            _name("tuneship service"), self._certificate.subject, key, begin, end
        )
        ends = x509.BasicConstraints(ca=False, path_length=None)
        certificate = builder.add_extension(ends, critical=True).sign(self._key, None)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # An agent is known by the digest of its certificate, which no authority has signed.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        _use(context, key, certificate)
        return context


def agent_context(trusted: str) -> tuple[ssl.SSLContext, str]:
    """Make an agent's TLS settings with a new key, and return them with the SHA-256 of its certificate.

    `trusted`: see `AgentAuthority.trusted`. Raises `ValueError` if that is no certificate.
    """
    authority = x509.load_der_x509_certificate(b64decode(trusted, validate=True))
    key, name = Ed25519PrivateKey.generate(), _name("tuneship agent")
    certificate = _certificate(name, name, key, BEGINNING, NO_END).sign(key, None)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=authority.public_bytes(serialization.Encoding.DER))
    _use(context, key, certificate)
    der = certificate.public_bytes(serialization.Encoding.DER)
    return context, hashlib.sha256(der).hexdigest()


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: Ed25519PrivateKey, begin: datetime, end: datetime
) -> x509.CertificateBuilder:
    public = key.public_key()
    # Not a random number: the authority's certificate must always be the same.
    number = int.from_bytes(hashlib.sha256(public.public_bytes_raw()).digest()[:16]) | 1
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(number)
        .not_valid_before(begin)
        .not_valid_after(end)
    )


def _use(context: ssl.SSLContext, key: Ed25519PrivateKey, certificate: x509.Certificate) -> None:
    """Use a key and its certificate in a context, which reads both from a file only: the key is encrypted there."""
    password = secrets.token_bytes(32)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )
    with tempfile.TemporaryDirectory(prefix="tuneship-") as folder:
        file = Path(folder) / "certificate.pem"
        file.write_bytes(encrypted + certificate.public_bytes(serialization.Encoding.PEM))
        context.load_cert_chain(file, password=password)
