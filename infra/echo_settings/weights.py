"""[weights]: how snapshots get from the learner to the workers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SecretStr, field_validator, model_validator

from echo_settings.section import Section

# 128 bits in hexadecimal.
_LEAST_SECRET = 32
# Peers on the same machine are not faster than Kafka.
_LOOPBACK = {"127.0.0.1", "::1", "localhost"}


class WeightsSettings(Section):
    """[weights]: how snapshots get from the learner to the workers (docs/weights.md)."""

    source: Literal["log", "store", "peers"] | None = None
    """All through Kafka, all through [store], or from worker to worker. None: Kafka or the store by [store] above_mb, and from worker to
    worker where there is a `secret`, `host` is not this machine alone, snapshots have 16 MiB or more, and three workers live."""
    secret: SecretStr = SecretStr("")
    """A secret of the run's workers, 32 characters or more; better given as `secret_file` or ECHO_WEIGHTS__SECRET."""
    delta: bool = False
    """Also publish the difference to the snapshot before, if it has less than half the size: workers that have that snapshot fetch only the
    difference. For [policy] update = "full" in bfloat16."""
    host: str = "127.0.0.1"
    """The address on which a worker listens for others; by default this machine alone, 0.0.0.0 for all of its addresses."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port; 0 takes a free one. One number serves one worker a machine."""
    advertise: str = ""
    """The host name under which others reach this machine; empty: `host`, or the machine's name if `host` is all addresses."""
    upload_mbit: float | None = Field(default=None, gt=0)
    """Most that one worker sends to others, in Mbit/s; none: no limit."""
    certificate_file: str = ""
    """A worker's certificate, PEM, for TLS, which peers speak where clients speak it to Kafka; empty: `ssl.certificate.location`."""
    key_file: str = ""
    """Its key, PEM, without a password; empty: `ssl.key.location`."""
    ca_file: str = ""
    """The CA of the workers' certificates, PEM; empty: `ssl.ca.location`."""

    @field_validator("secret")
    @classmethod
    def _secret_is_long(cls, secret: SecretStr) -> SecretStr:
        if 0 < len(secret.get_secret_value()) < _LEAST_SECRET:
            raise ValueError(f"is shorter than {_LEAST_SECRET} characters; make one with: openssl rand -hex 32")
        return secret

    @model_validator(mode="after")
    def _peers_have_a_secret(self) -> WeightsSettings:
        if self.source == "peers" and not self.secret.get_secret_value():
            raise ValueError('source = "peers" needs a secret: openssl rand -hex 32 > weights.secret, and secret_file = "weights.secret"')
        return self

    @property
    def may_pass_on(self) -> bool:
        """Whether workers may pass snapshots on."""
        is_meant = bool(self.secret.get_secret_value()) and self.host not in _LOOPBACK
        return self.source == "peers" or (self.source is None and is_meant)
