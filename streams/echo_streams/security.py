"""Translates librdkafka's security properties in [kafka.client] for Faust's Kafka client."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from echo_schemas.errors import UserError
from echo_streams.tokens import Issuer, issuer_of

logger = logging.getLogger(__name__)

PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
_OAUTH = "OAUTHBEARER"
MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", _OAUTH)
_UNDERSTOOD = frozenset(
    {
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.endpoint.identification.algorithm",
        "enable.ssl.certificate.verification",
        "https.ca.location",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.grant.type",
        "sasl.oauthbearer.token.endpoint.url",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.scope",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Login:
    """Credentials for the cluster. `mechanism` None: no SASL; `context` None: no TLS; `issuer`: of tokens for OAUTHBEARER."""

    context: ssl.SSLContext | None = None
    mechanism: str | None = None
    username: str | None = None
    # Not in the repr, which may end up in a log.
    password: str | None = None
    issuer: Issuer | None = None

    def __repr__(self) -> str:
        return f"Login(tls={self.context is not None}, mechanism={self.mechanism}, username={self.username})"


def login_of(client: Mapping[str, Any]) -> Login:
    """The login of [kafka.client]. A warning names properties without a counterpart, which have no effect here.

    Raises UserError for a protocol or mechanism that Faust's client cannot speak, and for files that cannot be read.
    """
    ignored = sorted(set(client) - _UNDERSTOOD)
    if ignored:
        logger.warning(
            "The reward application's Kafka client has no counterpart of these [kafka.client] properties: %s", ", ".join(ignored)
        )
    protocol = str(client.get("security.protocol", "PLAINTEXT")).upper()
    if protocol not in PROTOCOLS:
        raise UserError(f"security.protocol = {protocol!r} is unknown.", hint=f"Use one of {', '.join(PROTOCOLS)}.")
    context = _context_of(client) if protocol.endswith("SSL") else None
    if not protocol.startswith("SASL"):
        return Login(context=context)
    mechanism = str(client.get("sasl.mechanism", client.get("sasl.mechanisms", ""))).upper()
    if mechanism not in MECHANISMS:
        raise UserError(
            f"The reward application cannot log in with sasl.mechanism = {mechanism!r}.", hint=f"Use one of {', '.join(MECHANISMS)}."
        )
    if mechanism == _OAUTH:
        return Login(context=context, mechanism=mechanism, issuer=issuer_of(client))
    username, password = client.get("sasl.username"), client.get("sasl.password")
    if username is None or password is None:
        raise UserError("security.protocol asks for a login, but sasl.username or sasl.password is missing in [kafka.client].")
    return Login(context=context, mechanism=mechanism, username=str(username), password=str(password))


def _context_of(client: Mapping[str, Any]) -> ssl.SSLContext:
    location, pem = client.get("ssl.ca.location"), client.get("ssl.ca.pem")
    try:
        context = ssl.create_default_context(
            cafile=None if location in (None, "probe") else str(location), cadata=None if pem is None else str(pem)
        )
        certificate = client.get("ssl.certificate.location")
        if certificate is not None:
            context.load_cert_chain(str(certificate), _text(client.get("ssl.key.location")), _text(client.get("ssl.key.password")))
    except (OSError, ssl.SSLError) as exc:
        raise UserError(f"A certificate or key of [kafka.client] cannot be read: {exc}.") from exc
    verify = str(client.get("enable.ssl.certificate.verification", "true")).lower() != "false"
    if not verify or str(client.get("ssl.endpoint.identification.algorithm", "https")).lower() == "none":
        context.check_hostname = False
    if not verify:
        context.verify_mode = ssl.CERT_NONE
    return context


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
