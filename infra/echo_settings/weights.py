"""[weights]: which way snapshots take from the learner to the workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from echo_settings.section import Section

# 128 bits in hexadecimal.
_LEAST_SECRET = 32
# On one machine Kafka is as near as any peer.
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class WeightsSettings(Section):
    """[weights]: which way snapshots take from the learner to the workers (docs/weights.md)."""

    source: Literal["log", "store", "peers"] | None = None
    """All through Kafka, all through [store], or from worker to worker. None: Kafka or the store by [store] above_mb, and from worker to
    worker where there is a `secret`, `host` is not this machine alone, snapshots have 16 MiB or more, and three workers live."""
    secret: SecretStr = SecretStr("")
    """What the workers of a run know and nobody else, 32 characters or more; better given as `secret_file` or ECHO_WEIGHTS__SECRET."""
    delta: bool = False
    """Publish beside each snapshot what changed since the one before, where that is less than half of it: workers that have the one before
    fetch no more than that. For [policy] update = "full" in bfloat16."""
    host: str = "127.0.0.1"
    """Where a worker listens for others. This machine alone, unless told otherwise: 0.0.0.0 is all of its addresses."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 takes a free one. One number serves one worker a machine."""
    advertise: str = ""
    """Host that others reach this machine by; empty: `host`, or the machine's name where that is all addresses."""
    upload_mbit: float | None = Field(default=None, gt=0)
    """Most that one worker sends to others, in Mbit/s; none: as much as goes."""
    certificate_file: str = ""
    """A worker's certificate, PEM, for TLS, which peers speak where clients speak it to Kafka; empty: `ssl.certificate.location`."""
    key_file: str = ""
    """Its key, PEM, without a password; empty: `ssl.key.location`."""
    ca_file: str = ""
    """Who signed the workers' certificates, PEM; empty: `ssl.ca.location`."""

    @field_validator("secret")
    @classmethod
    def _secret_is_long(cls, secret: SecretStr) -> SecretStr:
        if 0 < len(secret.get_secret_value()) < _LEAST_SECRET:
            message = f"is shorter than {_LEAST_SECRET} characters; make one with: openssl rand -hex 32"
            raise ValueError(message)
        return secret

    @model_validator(mode="after")
    def _peers_have_a_secret(self) -> WeightsSettings:
        if self.source == "peers" and not self.secret.get_secret_value():
            message = 'source = "peers" needs a secret: openssl rand -hex 32 > weights.secret, and secret_file = "weights.secret"'
            raise ValueError(message)
        return self

    @property
    def may_pass_on(self) -> bool:
        """Whether workers may pass snapshots on."""
        is_meant = bool(self.secret.get_secret_value()) and self.host not in _LOOPBACK
        return self.source == "peers" or (self.source is None and is_meant)
