"""[trust]: who may write trajectories and rewards, and the file that says whose key is whose."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import AwareDatetime, field_validator, model_validator

from echo_settings.section import Section


class TrustSettings(Section):
    """[trust]: signatures under trajectories and rewards (docs/trust.md)."""

    signatures: Literal["off", "required"] = "off"
    """`required`: who reads a trajectory or a reward that no key of `signers` has signed takes it for a dead letter (`bad_signature`)."""
    keys: str = ""
    """A folder with the private keys of this machine, `<role>.<name>.key` or `<role>.key`: whoever writes trajectories or rewards signs
    them. Empty: nobody here signs."""
    signers: str = ""
    """The file that says whose public key is whose; `echoswarm keys new` adds to it. Needed by whoever reads where they are required."""

    @model_validator(mode="after")
    def _required_needs_signers(self) -> TrustSettings:
        if self.signatures == "required" and not self.signers:
            message = 'signatures = "required" needs signers, the file with the public keys; `echoswarm keys new` makes one'
            raise ValueError(message)
        return self


class SignerEntry(Section):
    """[[signer]]: one public key."""

    role: Literal["worker", "reward", "offline", "rescore", "redrive"]
    """Whose key it is; a role signs what it may write."""
    names: tuple[str, ...]
    """The workers, or rewards, that it may speak for; `*` stands for any letters."""
    key: str
    """The public key, 32 bytes in base64."""
    since: AwareDatetime | None = None
    """Records before this moment do not count; None: from ever."""
    until: AwareDatetime | None = None
    """Records from this moment on do not count; None: for ever."""

    @field_validator("names")
    @classmethod
    def _has_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            message = 'is empty, so the key would speak for nobody; write the names, or ["*"]'
            raise ValueError(message)
        return names

    @model_validator(mode="after")
    def _since_is_before_until(self) -> SignerEntry:
        if self.since is not None and self.until is not None and self.since >= self.until:
            message = "since is not before until, so the key would never count"
            raise ValueError(message)
        return self

    def ms(self, moment: datetime | None) -> int | None:
        """A moment as Kafka's timestamps have it."""
        return None if moment is None else int(moment.timestamp() * 1000)


class SignersFile(Section):
    """The whole file."""

    signer: tuple[SignerEntry, ...] = ()
