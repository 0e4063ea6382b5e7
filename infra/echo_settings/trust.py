"""[trust]: signatures under trajectories and rewards, and the file with the signers' public keys."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import AwareDatetime, field_validator, model_validator

from echo_settings.section import Section


class TrustSettings(Section):
    """[trust]: signatures under trajectories and rewards (docs/trust.md)."""

    signatures: Literal["off", "required"] = "off"
    """`required`: a trajectory or reward that no key of `signers` has signed becomes a dead letter (`bad_signature`)."""
    keys: str = ""
    """A folder with this machine's private keys, `<role>.<name>.key` or `<role>.key`, with which roles sign their trajectories and
    rewards. Empty: they do not sign."""
    signers: str = ""
    """The file with the public keys of all signers; `echoswarm keys new` adds to it. Each reader needs it if signatures are required."""

    @model_validator(mode="after")
    def _required_needs_signers(self) -> TrustSettings:
        if self.signatures == "required" and not self.signers:
            raise ValueError('signatures = "required" needs signers, the file with the public keys; `echoswarm keys new` makes one')
        return self


class SignerEntry(Section):
    """[[signer]]: one public key."""

    role: Literal["worker", "reward", "offline", "rescore", "redrive"]
    """The role that owns the key; a role signs the records that it may write."""
    names: tuple[str, ...]
    """The workers or rewards for which it may sign; `*` stands for any letters."""
    key: str
    """The public key, 32 bytes in base64."""
    since: AwareDatetime | None = None
    """Records before this moment are not valid; None: no limit."""
    until: AwareDatetime | None = None
    """Records from this moment on are not valid; None: no limit."""

    @field_validator("names")
    @classmethod
    def _has_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise ValueError('is empty, so the key could sign for no name; write the names, or ["*"]')
        return names

    @model_validator(mode="after")
    def _since_is_before_until(self) -> SignerEntry:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ValueError("since is not before until, so the key would never count")
        return self

    def ms(self, moment: datetime | None) -> int | None:
        """A moment in milliseconds since the epoch, as in Kafka's timestamps."""
        return None if moment is None else int(moment.timestamp() * 1000)


class SignersFile(Section):
    """The whole file."""

    signer: tuple[SignerEntry, ...] = ()
