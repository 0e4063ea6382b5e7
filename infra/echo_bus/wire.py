"""What every reader and writer of the log needs: names, schemas, metrics, clock, its own role, and the trusted keys."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from echo_bus.clock import Clock, SystemClock
from echo_bus.dead_letter_budget import DeadLetterLimits
from echo_bus.metrics import BusMetrics
from echo_schemas.codec import Codec, lock_file_codec
from echo_schemas.naming import Namespace

if TYPE_CHECKING:
    from echo_bus.signatures import Signer, Verifier
    from echo_bus.tracing import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The context of one role's readers and writers.

    `run_id` None reads every run. On topics whose records have an author, `signer` signs the records that this role publishes, and
    `verifier` refuses records that no trusted key has signed. `tracer` follows some groups.
    """

    namespace: Namespace
    role: str
    codec: Codec = field(default_factory=lock_file_codec)
    metrics: BusMetrics = field(default_factory=BusMetrics)
    clock: Clock = field(default_factory=SystemClock)
    run_id: str | None = None
    dead_letter_limits: DeadLetterLimits = field(default_factory=DeadLetterLimits)
    signer: Signer | None = None
    verifier: Verifier | None = None
    tracer: Tracer | None = None

    @property
    def client_id(self) -> str:
        """`<namespace>.<role>`: the name in quotas, broker logs and record headers."""
        return self.namespace.client_id(self.role)
