"""A provider of OpenID Connect that says what a test wants, true or not."""

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT, SECRET = "tuneship", "a secret: +&%"
ALGORITHMS = ["RS256", "none"]


class FakeOpenIdProvider:
    """Signs with a key of its own; each answer can be changed."""

    def __init__(self, issuer: str) -> None:
        self.issuer = issuer
        self.key = RSAKey.generate_key(2048, {"kid": "first", "use": "sig"})
        self.published = [self.key]
        self.header: dict[str, Any] = {"alg": "RS256", "kid": "first"}
        self.signing_key: Any = self.key
        self.now: Callable[[], float] = time.time
        # More claims of the ID token; None takes one away.
        self.claims: dict[str, Any] = {"name": "Ann Weber", "groups": ["ml-operators"]}
        self.userinfo: dict[str, Any] = {}
        # Whole answers in place of the right ones, by path: a status and bytes.
        self.instead: dict[str, tuple[int, bytes]] = {}
        self.description: dict[str, Any] = {}
        self.wait_s = 0.0
        self.asked: list[str] = []
        self.token_requests: list[tuple[dict[str, str], str]] = []
        self._codes: dict[str, dict[str, str]] = {}

    def authorize(self, address: str, subject: str = "u-4711") -> str:
        """Sign somebody in at the authorization endpoint; returns the query with which it leads back."""
        query = dict(parse_qsl(urlsplit(address).query))
        code = f"code-{len(self._codes)}"
        self._codes[code] = {**query, "sub": subject}
        return f"code={code}&state={query['state']}&iss={self.issuer}"

    def answer(self, path: str, form: dict[str, str], authorization: str) -> tuple[int, bytes]:
        self.asked.append(path)
        time.sleep(self.wait_s)
        if path in self.instead:
            return self.instead[path]
        answers: dict[str, Callable[[], Any]] = {
            "/.well-known/openid-configuration": self._described,
            "/keys": lambda: {"keys": [key.as_dict(private=False) for key in self.published]},
            "/token": lambda: self._token(form, authorization),
            "/me": lambda: self.userinfo,
        }
        found = answers[path]()
        return (
            (400, b'{"error": "invalid_grant"}')
            if found is None
            else (200, json.dumps(found).encode())
        )

    def _described(self) -> dict[str, Any]:
        names = {
            "authorization_endpoint": "auth",
            "token_endpoint": "token",
            "jwks_uri": "keys",
            "end_session_endpoint": "end",
        }
        return (
            {"issuer": self.issuer}
            | {name: f"{self.issuer}/{path}" for name, path in names.items()}
            | self.description
        )

    def _token(self, form: dict[str, str], authorization: str) -> dict[str, Any] | None:
        self.token_requests.append((form, authorization))
        # A code is good once.
        begun = self._codes.pop(form["code"], None)
        if begun is None:
            return None
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != begun["code_challenge"]:
            return None
        now = int(self.now())
        claims = {
            "iss": self.issuer,
            "aud": CLIENT,
            "sub": begun["sub"],
            "nonce": begun["nonce"],
            "iat": now,
            "exp": now + 300,
        } | self.claims
        claims = {name: value for name, value in claims.items() if value is not None}
        if isinstance(self.signing_key, bytes):
            token = signed_by_secret(self.header, claims, self.signing_key)
        else:
            token = jwt.encode(self.header, claims, self.signing_key, algorithms=ALGORITHMS)
        return {"access_token": "at-planted", "token_type": "Bearer", "id_token": token}


def signed_by_secret(header: dict[str, Any], claims: dict[str, Any], secret: bytes) -> str:
    """A token of HS256 made by hand: the library refuses to take a public key for a secret."""

    def encoded(part: bytes) -> bytes:
        return base64.urlsafe_b64encode(part).rstrip(b"=")

    text = b".".join(encoded(json.dumps(part).encode()) for part in (header, claims))
    return (text + b"." + encoded(hmac.digest(secret, text, "sha256"))).decode()


@contextmanager
def running() -> Iterator[FakeOpenIdProvider]:
    """A provider at a free port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            self._answer({name: values[0] for name, values in parse_qs(body).items()})

        def _answer(self, form: dict[str, str]) -> None:
            authorization = self.headers.get("Authorization", "")
            status, content = provider.answer(self.path, form, authorization)
            self.send_response(status)
            if status in (301, 302):
                self.send_header("Location", content.decode())
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(OSError):  # the service may have heard enough
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = FakeOpenIdProvider(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
