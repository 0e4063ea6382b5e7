"""Access tokens for Faust's Kafka client, by client credentials (RFC 6749, 4.4) as in librdkafka's `oidc` method.

Threads: `token` may be called from any thread; it blocks while it asks the issuer.
"""

from __future__ import annotations

import base64
import json
import logging
import ssl
import threading
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo_bus.clock import Clock, SystemClock
from echo_schemas.errors import UserError

logger = logging.getLogger(__name__)

_TIMEOUT_S = 10.0
# Share of a token's life after which the next one is requested, as in librdkafka.
_USED_SHARE = 0.8
_DEFAULT_LIFE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Issuer:
    """The issuer's address and the client's credentials. `ca_file`: certificates of the issuer's authority; None: the system's."""

    url: str
    client_id: str
    client_secret: str = field(repr=False)
    scope: str = ""
    ca_file: str | None = None


def issuer_of(client: Mapping[str, Any]) -> Issuer:
    """The issuer of [kafka.client]. Raises UserError for another method, and for missing properties."""
    prefix = "sasl.oauthbearer."
    if client.get(f"{prefix}method") != "oidc" or client.get(f"{prefix}grant.type", "client_credentials") != "client_credentials":
        raise UserError(
            "The reward application gets its tokens by client credentials only.",
            hint='Set "sasl.oauthbearer.method" = "oidc" in [kafka.client], and no other "sasl.oauthbearer.grant.type".',
        )
    missing = [name for name in ("token.endpoint.url", "client.id", "client.secret") if not client.get(prefix + name)]
    if missing:
        raise UserError(
            f"[kafka.client] lacks {', '.join(prefix + name for name in missing)}.",
            hint='The secret comes from a file: "sasl.oauthbearer.client.secret_file".',
        )
    ca_file = client.get("https.ca.location")
    return Issuer(
        url=str(client[f"{prefix}token.endpoint.url"]),
        client_id=str(client[f"{prefix}client.id"]),
        client_secret=str(client[f"{prefix}client.secret"]),
        scope=str(client.get(f"{prefix}scope", "")),
        ca_file=None if ca_file in (None, "probe") else str(ca_file),
    )


class TokenSource:
    """The newest token of an issuer, renewed before it expires."""

    def __init__(self, issuer: Issuer, clock: Clock | None = None) -> None:
        self._issuer = issuer
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._token, self._good_until_s = "", 0.0

    def token(self) -> str:
        """Raises OSError if the issuer does not answer, or refuses: the client then tries to connect again."""
        with self._lock:
            if not self._token or self._clock.monotonic_s() >= self._good_until_s:
                try:
                    answer = self._ask()
                    self._token = str(answer["access_token"])
                except (OSError, ValueError, KeyError) as exc:
                    # These errors contain neither the secret nor a token.
                    logger.warning("No token for %s from %s: %s", self._issuer.client_id, self._issuer.url, exc)
                    raise OSError(f"no token from {self._issuer.url}") from exc
                self._good_until_s = self._clock.monotonic_s() + _USED_SHARE * float(answer.get("expires_in", _DEFAULT_LIFE_S))
            return self._token

    def _ask(self) -> dict[str, Any]:
        issuer = self._issuer
        if not issuer.url.startswith(("https://", "http://")):
            raise ValueError("its address is neither https nor http")
        form = {"grant_type": "client_credentials", **({"scope": issuer.scope} if issuer.scope else {})}
        login = base64.b64encode(f"{issuer.client_id}:{issuer.client_secret}".encode()).decode()
        request = urllib.request.Request(  # noqa: S310  the scheme is checked above
            issuer.url, urllib.parse.urlencode(form).encode(), {"Authorization": f"Basic {login}", "Accept": "application/json"}
        )
        context = ssl.create_default_context(cafile=issuer.ca_file) if issuer.url.startswith("https://") else None
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as answer:  # noqa: S310  see above
            content = json.load(answer)
        if not isinstance(content, dict):
            raise ValueError("its answer is no JSON object")  # noqa: TRY004  the answer is wrong, not an argument
        return content
