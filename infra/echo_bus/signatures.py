"""Signatures of records (Ed25519, RFC 8032): made when a record is published, checked when it is read, before decoding.

    records ─▶ a digest each ─▶ at most 16 digests, one signature ─▶ the same header on each of these records

    header   1;<key id>;<signature>;<digests>      base64, because all our headers are text
    digest   the first 16 bytes of SHA-256 over physical topic, key and value, so a copy on another topic or key is not valid

Checking a signature takes a hundred microseconds, a digest five. So the verifier remembers each valid header for the other records that it
covers. docs/decisions/0028-signatures.md says what is promised and what is not.

Threads: any thread may use both.
"""

from __future__ import annotations

import binascii
import functools
import hashlib
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo_bus.client.cluster import RawMessage
from echo_bus.message import raw_headers
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.headers import SIGNATURE, Header
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import Topic

MOST_TOGETHER = 16
"""Most records under one signature; each record's header holds the digests of all of them."""
_DIGEST_BYTES = 16
_VERSION = b"1"
# Part of the signed bytes, so that no signature made for another purpose is valid here.
_CONTEXT = b"echoswarm record signatures 1\n"
# Valid headers that are remembered: enough for ten thousand records that arrive in any order.
_MOST_REMEMBERED = 1_024
_KEY_ID_DIGITS = 16


def key_id_of(public: Ed25519PublicKey) -> str:
    """The first digits of the SHA-256 of a public key."""
    return hashlib.sha256(public.public_bytes_raw()).hexdigest()[:_KEY_ID_DIGITS]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustedKey:
    """A key and what it may sign. `names`: its workers or rewards, `*` matches any letters; valid in [`since_ms`, `until_ms`)."""

    id: str
    public: Ed25519PublicKey
    role: str
    names: tuple[str, ...]
    since_ms: int | None = None
    until_ms: int | None = None

    def require_author(self, topic: Topic, author: str) -> None:
        """Raises InvalidRecord if the key may not sign for `author`, or its role does not write to `topic`."""
        if not any(fnmatchcase(author, pattern) for pattern in self.names):
            raise _bad(f"The key {self.id} of {self.role} {', '.join(self.names)} has signed for {author!r}.")
        if self.role not in _writers_of(topic.name):
            raise _bad(f"The key {self.id} belongs to the role {self.role}, which writes no {topic.name}.")


TrustedKeys = Callable[[], Mapping[str, TrustedKey]]
"""The valid keys by id. Returns a new mapping object when they have changed."""


class Signer:
    """Signs the records of one process."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.key_id = key_id_of(private.public_key())

    def sign(self, physical: str, records: Sequence[tuple[str | bytes | None, bytes]]) -> list[Header]:
        """The header of each of `records`, which are (key, value) on the topic `physical`."""
        headers: list[Header] = []
        for first in range(0, len(records), MOST_TOGETHER):
            together = records[first : first + MOST_TOGETHER]
            digests = b"".join(_digest(physical, key, value) for key, value in together)
            signature = self._private.sign(_CONTEXT + digests)
            content = b";".join((_VERSION, self.key_id.encode(), b64encode(signature), b64encode(digests)))
            headers += [(SIGNATURE, content)] * len(together)
        return headers


class Verifier:
    """Finds the trusted key that signed a message."""

    def __init__(self, keys: TrustedKeys) -> None:
        self._keys = keys
        self._known = keys()
        self._remembered: OrderedDict[bytes, tuple[TrustedKey, frozenset[bytes]]] = OrderedDict()

    def signer_of(self, raw: RawMessage) -> TrustedKey:
        """The key that signed this message. Raises InvalidRecord without a valid signature, or if the key was not valid at that time."""
        found = [value for name, value in raw_headers(raw) if name == SIGNATURE and value]
        if len(found) != 1:
            raise _bad("The record has several signatures." if found else "The record is not signed.")
        keys, remembered = self._keys(), self._remembered
        if keys is not self._known:
            remembered = self._remembered = OrderedDict()
            self._known = keys
        header = found[0]
        good = remembered.get(header)
        if good is None:
            good = remembered[header] = _opened(header, keys)
            if len(remembered) > _MOST_REMEMBERED:
                remembered.popitem(last=False)
        key, digests = good
        if _digest(raw.topic() or "", raw.key(), raw.value() or b"") not in digests:
            raise _bad(f"The signature of the key {key.id} ({key.role} {', '.join(key.names)}) is of another record.")
        time_ms = raw.timestamp()[1]
        if (key.since_ms is not None and time_ms < key.since_ms) or (key.until_ms is not None and time_ms >= key.until_ms):
            raise _bad(f"The key {key.id} ({key.role} {', '.join(key.names)}) does not count at the time of the record.")
        return key


def _opened(header: bytes, keys: Mapping[str, TrustedKey]) -> tuple[TrustedKey, frozenset[bytes]]:
    """The key and the digests of a header. Raises InvalidRecord unless its signature is valid."""
    try:
        version, key_id, signature, content = header.split(b";")
        signed = b64decode(signature, validate=True), b64decode(content, validate=True)
    except (ValueError, binascii.Error):
        raise _bad("The header of the signature cannot be read.") from None
    digests = signed[1]
    if version != _VERSION or not digests or len(digests) % _DIGEST_BYTES or len(digests) > MOST_TOGETHER * _DIGEST_BYTES:
        raise _bad("The header of the signature is not one that this release reads.")
    key = keys.get(key_id.decode(errors="replace"))
    if key is None:
        raise _bad(f"The key {key_id[:_KEY_ID_DIGITS].decode(errors='replace')!r} is not among those that are trusted.")
    try:
        key.public.verify(signed[0], _CONTEXT + digests)
    except InvalidSignature:
        raise _bad(f"The signature is not one of the key {key.id} ({key.role} {', '.join(key.names)}).") from None
    return key, frozenset(digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES))


def _digest(physical: str, key: str | bytes | None, value: bytes) -> bytes:
    """Each part follows its length, so that no two different (topic, key) give the same bytes."""
    topic, name = physical.encode(), key.encode() if isinstance(key, str) else key or b""
    found = hashlib.sha256(b"%d:%b%d:%b" % (len(topic), topic, len(name), name))
    found.update(value)
    return found.digest()[:_DIGEST_BYTES]


@functools.cache
def _writers_of(topic: str) -> tuple[str, ...]:
    return next(spec.producers for spec in load_topic_specs() if spec.name == topic)


def _bad(says: str) -> InvalidRecord:
    return InvalidRecord(InvalidReason.BAD_SIGNATURE, says)
