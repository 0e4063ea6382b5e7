"""The keys of a process from [trust]: its signing key, and the keys that it trusts.

A private key is a PEM file (PKCS#8) that only its owner can read. All public keys stand in one shared file, which a process reads again
when it changes, so adding or withdrawing a key needs no restart.
"""

from __future__ import annotations

import binascii
import logging
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from echo_bus.clock import Clock, SystemClock
from echo_schemas.errors import UserError
from echo_schemas.libraries import SIGNATURES, require_libraries
from echo_schemas.roles import load_roles
from echo_schemas.topic_files import TopicSpec, load_topic_specs
from echo_settings.load import load_sections
from echo_settings.trust import SignersFile, TrustSettings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from echo_bus.signatures import Signer, TrustedKey, Verifier

logger = logging.getLogger(__name__)

# Each check costs a call to the file system.
_LOOK_EVERY_S = 5.0


def open_signer(settings: TrustSettings, role: str) -> Signer | None:
    """The signer of `role` (or `role.name`); None if it writes no signed records, or [trust] names no keys.

    Raises UserError if a needed key is missing or cannot be read.
    """
    kind, _, name = role.partition(".")
    if not settings.keys or kind not in {writer for spec in _signed_specs() for writer in spec.producers}:
        return None
    folder = Path(settings.keys)
    path = next((file for file in (key_file(folder, kind, name), key_file(folder, kind)) if file.exists()), None)
    if path is None:
        # The other roles are commands, and most of them write nothing.
        if kind in {"worker", "reward", "offline"}:
            raise UserError(
                f"There is no key for {role} in {folder}, which [trust] keys names.",
                hint=f"`echoswarm keys new {kind}{f' {name}' if kind == 'worker' and name else ''}` makes one.",
            )
        return None
    require_libraries("[trust]", "cryptography", install=SIGNATURES)
    from echo_bus.signatures import Signer

    return Signer(read_private_key(path))


def open_verifier(settings: TrustSettings, role: str) -> Verifier | None:
    """The verifier of `role`; None if signatures are not required, or it reads no signed records. Raises UserError."""
    # First, because reading the files of roles and topics would take a tenth of a short command's time.
    if settings.signatures == "off":
        return None
    kind = role.partition(".")[0]
    known = load_roles().get(kind)
    if known is not None and not known.reads_all_topics and not any(kind in spec.consumers for spec in _signed_specs()):
        return None
    require_libraries("[trust]", "cryptography", install=SIGNATURES)
    from echo_bus.signatures import Verifier

    return Verifier(SignersList(Path(settings.signers)))


class SignersList:
    """The keys of a file of signers, read again when it changes. If it cannot be read, the old keys stay."""

    def __init__(self, path: Path, clock: Clock | None = None) -> None:
        """Raises UserError if the file cannot be read."""
        self._path = path
        self._clock = clock or SystemClock()
        self._state = _state_of(path)
        self._keys = read_signers(path)
        self._looked_s = self._clock.monotonic_s()

    def __call__(self) -> Mapping[str, TrustedKey]:
        now_s = self._clock.monotonic_s()
        if now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            state = _state_of(self._path)
            if state != self._state:
                self._state = state
                try:
                    self._keys = read_signers(self._path)
                    logger.info("%d keys are trusted now (%s has changed)", len(self._keys), self._path)
                except UserError as exc:
                    logger.error("%s The keys that were trusted before stay.", exc.message)  # noqa: TRY400  one sentence says all
        return self._keys


def read_private_key(path: Path) -> Ed25519PrivateKey:
    """The key in a file. Raises UserError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as exc:
        raise UserError(f"The key {path} cannot be read: {exc}.", hint="`echoswarm keys new` makes one.") from exc
    if not isinstance(private, Ed25519PrivateKey):
        raise UserError(f"The key {path} is none of Ed25519.", hint="`echoswarm keys new` makes one.")
    return private


def read_signers(path: Path) -> dict[str, TrustedKey]:
    """The keys of a file, by id. Raises UserError."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from echo_bus.signatures import TrustedKey, key_id_of

    if not path.exists():
        raise UserError(f"There is no file of signers {path}, which [trust] signers names.", hint="`echoswarm keys new` makes one.")
    keys: dict[str, TrustedKey] = {}
    for number, entry in enumerate(load_sections(path, SignersFile).signer, start=1):
        try:
            public = Ed25519PublicKey.from_public_bytes(b64decode(entry.key, validate=True))
        except (ValueError, binascii.Error) as exc:
            raise UserError(f"{path}: [[signer]] {number}: key is no public key: it has 32 bytes in base64.") from exc
        key_id = key_id_of(public)
        if key_id in keys:
            raise UserError(
                f"{path}: [[signer]] {number} has the same key as an earlier one.", hint="One key has one role; names is a list."
            )
        keys[key_id] = TrustedKey(
            id=key_id,
            public=public,
            role=entry.role,
            names=entry.names,
            since_ms=entry.ms(entry.since),
            until_ms=entry.ms(entry.until),
        )
    return keys


def key_file(folder: Path, role: str, name: str = "") -> Path:
    """The file of a role's private key, or of one process's. A name with `*` gives the role's."""
    return folder / (f"{role}.{name}.key" if name and "*" not in name else f"{role}.key")


def _state_of(path: Path) -> tuple[int, int] | None:
    """Modification time and size, to detect a change."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _signed_specs() -> list[TopicSpec]:
    return [spec for spec in load_topic_specs() if spec.topic is not None and spec.topic.author is not None]
