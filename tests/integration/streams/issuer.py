"""A small OpenID issuer on loopback, and client certificates: the two other ways to log in."""

from __future__ import annotations

import base64
import datetime
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

AUDIENCE, KEY_ID = "kafka", "k1"
LIFE_S = 60
# Not the name of the broker's own: clients would send that one along.
AUTHORITY = "authority of the clients"


class Issuer:
    """`/jwks` has its public key; `/token` gives whoever knows the secret a token under the name that he gives."""

    def __init__(self, secret: str) -> None:
        self.secret, self.num_refused = secret, 0
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                numbers = issuer._key.public_key().public_numbers()
                key = {"kty": "RSA", "use": "sig", "alg": "RS256", "kid": KEY_ID, "n": _number(numbers.n), "e": _number(numbers.e)}
                self._answer(200, {"keys": [key]})

            def do_POST(self) -> None:
                login = base64.b64decode(self.headers["Authorization"].removeprefix("Basic ")).decode()
                name, _, secret = login.partition(":")
                if secret != issuer.secret:
                    issuer.num_refused += 1
                    self._answer(401, {"error": "invalid_client"})
                    return
                self._answer(200, {"access_token": issuer._token(name), "token_type": "Bearer", "expires_in": LIFE_S})

            def _answer(self, status: int, content: dict[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def serving(self) -> Iterator[Issuer]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()

    def _token(self, name: str) -> str:
        now_s = int(time.time())
        head, body = (
            _text(json.dumps(part).encode())
            for part in (
                {"alg": "RS256", "kid": KEY_ID, "typ": "JWT"},
                {"sub": name, "aud": AUDIENCE, "iss": self.url, "iat": now_s, "exp": now_s + LIFE_S},
            )
        )
        signature = self._key.sign(f"{head}.{body}".encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{head}.{body}.{_text(signature)}"


class Clients:
    """An authority of its own, and certificates of clients that it signed; `<name>.pem` holds key and certificate."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        self.authority = folder / "clients.pem"
        root = _signed(AUTHORITY, self._key, self._key, x509.BasicConstraints(ca=True, path_length=0))
        self.authority.write_bytes(root.public_bytes(serialization.Encoding.PEM))

    def certificate(self, name: str, password: str) -> Path:
        """Its key is under `password`."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        signed = _signed(name, key, self._key, x509.ExtendedKeyUsage([x509.OID_CLIENT_AUTH]))
        locked = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(password.encode())
        )
        path = self._folder / f"{name}.pem"
        path.write_bytes(locked + signed.public_bytes(serialization.Encoding.PEM))
        return path


def _signed(name: str, key: rsa.RSAPrivateKey, signer: rsa.RSAPrivateKey, extension: x509.ExtensionType) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    subject, issuer = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in (name, AUTHORITY))
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        .sign(signer, hashes.SHA256())
    )


def _number(value: int) -> str:
    return _text(value.to_bytes((value.bit_length() + 7) // 8, "big"))


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).rstrip(b"=").decode()
