"""A secured embedded cluster: TLS, SCRAM-SHA-512 users and an authorizer that refuses what no ACL allows. For testing ACLs.

The certificates, for 127.0.0.1, come from an authority of this cluster alone; the controllers authenticate with them. The administrator's
password is random. Both lie in the cluster's folder, readable by their owner only.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import ipaddress
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from confluent_kafka import KafkaException
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)

from echo_bus.errors import TransportError
from echo_embedded.properties import HOST
from echo_schemas.libraries import library_missing

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey

ADMIN = "admin"
MECHANISM = "SCRAM-SHA-512"
# The least that Kafka accepts, and RFC 7677's minimum: this cluster is for tests.
SCRAM_ITERATIONS = 4096
_ADD_USER_TIMEOUT_S = 30.0
_NODE_NAME = "embedded-broker"
_AUTHORITY_NAME = "EchoSwarm embedded authority"
_RSA_BITS = 2048
_VALID = datetime.timedelta(days=3650)


class Security:
    """The certificates and the administrator of one cluster, created at first use and kept in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.authority = folder / "ca.pem"
        self._certificate = folder / "broker.pem"
        password_file = folder / "admin.password"
        if not password_file.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            _make_certificates(self.authority, self._certificate)
            _write_private(password_file, secrets.token_urlsafe(24).encode())
        self._password = password_file.read_text(encoding="utf-8")

    def client_properties(self, user: str = ADMIN, password: str | None = None) -> dict[str, str]:
        """The librdkafka properties of `user`; by default the administrator's."""
        return {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": MECHANISM,
            "sasl.username": user,
            "sasl.password": self._password if password is None else password,
            "ssl.ca.location": str(self.authority),
        }

    def broker_properties(self) -> dict[str, str]:
        """The security properties of server.properties, without the listeners' names."""
        login = "org.apache.kafka.common.security.scram.ScramLoginModule"
        return {
            "listener.security.protocol.map": "CONTROLLER:SSL,SASL_SSL:SASL_SSL",
            "sasl.enabled.mechanisms": MECHANISM,
            "sasl.mechanism.inter.broker.protocol": MECHANISM,
            f"listener.name.sasl_ssl.{MECHANISM.lower()}.sasl.jaas.config": (
                f'{login} required username="{ADMIN}" password="{self._password}";'
            ),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self._certificate),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authority),
            # Controllers authenticate by certificate, so that no anonymous principal is a super user.
            "listener.name.controller.ssl.client.auth": "required",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:CN={_NODE_NAME}",
            "allow.everyone.if.no.acl.found": "false",
        }

    def scram_option(self) -> str:
        """The storage tool's --add-scram value for the administrator, already salted, so that the command line shows no password."""
        salt = secrets.token_bytes(16)
        salted = hashlib.pbkdf2_hmac("sha512", self._password.encode(), salt, SCRAM_ITERATIONS)
        fields = {
            "name": ADMIN,
            "iterations": str(SCRAM_ITERATIONS),
            "salt": f'"{base64.b64encode(salt).decode()}"',
            "saltedpassword": f'"{base64.b64encode(salted).decode()}"',
        }
        return f"{MECHANISM}=[{','.join(f'{key}={value}' for key, value in fields.items())}]"


def add_scram_users(admin: AdminClient, passwords: Mapping[str, str]) -> None:
    """Add users by name, or change their passwords. `admin`: an administrator's client. Raises TransportError."""
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, SCRAM_ITERATIONS)
    wanted: list[UserScramCredentialAlteration] = [
        UserScramCredentialUpsertion(name, info, password.encode()) for name, password in passwords.items()
    ]
    for name, added in admin.alter_user_scram_credentials(wanted).items() if wanted else ():
        try:
            added.result(_ADD_USER_TIMEOUT_S)
        except KafkaException as exc:
            raise TransportError(f"The user {name!r} could not be added: {exc}.") from exc


def _make_certificates(authority: Path, certificate: Path) -> None:
    """Write the authority's certificate, and for Kafka the node's key, certificate and chain in one PEM file."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa
    except ModuleNotFoundError as exc:
        raise library_missing("A secured embedded Kafka", exc.name, "cryptography") from exc
    authority_key = rsa.generate_private_key(public_exponent=65537, key_size=_RSA_BITS)
    root = _sign(_AUTHORITY_NAME, authority_key, authority_key, [(x509.BasicConstraints(ca=True, path_length=0), True)])
    node_key = rsa.generate_private_key(public_exponent=65537, key_size=_RSA_BITS)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(HOST))])
    usage = x509.ExtendedKeyUsage([x509.OID_SERVER_AUTH, x509.OID_CLIENT_AUTH])
    node = _sign(_NODE_NAME, node_key, authority_key, [(names, False), (usage, False)])
    pem = serialization.Encoding.PEM
    key_bytes = node_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    authority.write_bytes(root.public_bytes(pem))
    _write_private(certificate, key_bytes + node.public_bytes(pem) + root.public_bytes(pem))


def _sign(name: str, key: RSAPrivateKey, signer: RSAPrivateKey, extensions: list[tuple[x509.ExtensionType, bool]]) -> x509.Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(_distinguished(name))
        .issuer_name(_distinguished(_AUTHORITY_NAME))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _VALID)
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(signer, hashes.SHA256())


def _distinguished(name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _write_private(file: Path, content: bytes) -> None:
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        opened.write(content)
