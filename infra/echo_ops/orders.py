"""The operator's orders to a run: records on `control`."""

from __future__ import annotations

from contextlib import closing

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_schemas.records import Control, EvaluationOrder, RewardAttachment, RewardControl, RunControl
from echo_schemas.topics import CONTROL

_WRITE_S = 15.0


def give_order(
    bus: Bus,
    run_id: str,
    known: Control | None,
    *,
    run: RunControl | None = None,
    rewards: RewardControl | None = None,
    attachment: RewardAttachment | None = None,
    evaluation: EvaluationOrder | None = None,
) -> None:
    """Write an order with an epoch above that of `known`, the newest order of the same key.

    Raises TransportError, DeadlineExceeded.
    """
    now_ms = bus.clock.time_ms()
    epoch = max(now_ms, 0 if known is None else known.epoch + 1)
    order = Control(
        run_id=run_id,
        epoch=epoch,
        run=run,
        rewards=rewards,
        attachment=attachment,
        evaluation=evaluation,
        issued_by=bus.client_id,
        time_ms=now_ms,
    )
    with closing(bus.publisher(profiles.PRODUCER_LATENCY)) as publisher:
        publisher.publish(CONTROL, order).wait(_WRITE_S)
