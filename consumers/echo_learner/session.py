"""Who the learner is: one session owns a namespace, and the log says which.

    refuse while another heartbeats ─▶ take over the transactional id (fences) ─▶ claim on `steps` ─▶ read `steps` to its end ─▶ the tip

The tip is the newest committed StepReport of the run. A step exists once a checkpoint holds it, and is public once its report is committed.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass, replace

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded
from echo_bus.message import Message
from echo_bus.transactions import TransactionalWriter
from echo_schemas.errors import UserError
from echo_schemas.records import Progress, SessionClaim, StepReport
from echo_schemas.topics import PROGRESS, REWARDS, STEPS, TRAJECTORIES, WEIGHTS

logger = logging.getLogger(__name__)

READ_S = 60.0
# Three of the learner's heartbeats, which come once a second.
_SILENCE_S = 3.0
# A heartbeat older than this needs no watching: whoever wrote it is gone.
_FORGOTTEN_MS = 10_000
# Records of `steps` looked at first, from its end; four times as many each time none is the run's.
_TAIL = 64

# The topics whose positions and records a checkpoint builds on.
_KEPT_TOPICS = (TRAJECTORIES, REWARDS, STEPS, WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """The end of `steps`: the run's newest report, and the newest claim of anybody."""

    report: StepReport | None
    claim: SessionClaim | None

    @property
    def version(self) -> int:
        """Training steps that are public."""
        return 0 if self.report is None else self.report.version

    @property
    def checkpoint(self) -> str | None:
        """Where the newest public step is kept."""
        return None if self.report is None else self.report.checkpoint


def new_session() -> str:
    """A name that no other session has."""
    return secrets.token_hex(4)


def read_tip(bus: Bus, run_id: str) -> Tip:
    """Read `steps` from its end backwards until the run's newest report and a claim are found. Committed records only.

    Raises DeadlineExceeded, TopicMissing, NotAuthorized, ClusterUnreachable.
    """
    reader = _every_run(bus).reader([STEPS])
    try:
        ends = reader.start()
        lows = reader.positions
        window = _TAIL
        while True:
            starts = {place: max(lows[place], end - window) for place, end in ends.items()}
            reader.start(starts)
            report, claim = _scan(reader.read_to_end(Deadline.after(READ_S, bus.clock), ends), run_id)
            if (report is not None and claim is not None) or starts == lows:
                return Tip(report=report, claim=claim)
            window *= 4
    finally:
        reader.close()


def _every_run(bus: Bus) -> Bus:
    """Claims of other runs count too: a namespace holds one running pipeline."""
    return replace(bus, run_id=None)


def _scan(batches: Iterable[list[Message]], run_id: str) -> tuple[StepReport | None, SessionClaim | None]:
    report: StepReport | None = None
    claim: SessionClaim | None = None
    for messages in batches:
        for message in messages:
            record = message.record
            if isinstance(record, StepReport) and record.run_id == run_id:
                report = record
            elif isinstance(record, SessionClaim):
                claim = record
    return report, claim


def refuse_if_alive(bus: Bus, claim: SessionClaim | None, *, takeover: bool) -> None:
    """Raise UserError if the session that owns the namespace still heartbeats, unless it is to be taken over."""
    if claim is not None and not takeover and is_alive(bus, claim):
        raise UserError(
            f"A learner is alive in this namespace: run {claim.run_id!r}, process {claim.pid} on {claim.host}, session {claim.session}.",
            hint="Stop it first, use another [kafka] namespace, or start this one with --takeover, which fences it.",
        )


def is_alive(bus: Bus, claim: SessionClaim) -> bool:
    """Whether the session of `claim` heartbeats. Blocks for three heartbeats if it may."""
    view = _every_run(bus).view(PROGRESS, Progress)
    try:
        last = view.get(claim.run_id)
        if last is None or last.session != claim.session or bus.clock.time_ms() - last.time_ms > _FORGOTTEN_MS:
            return False
        try:
            view.wait_for(
                claim.run_id, lambda progress: progress.time_ms > last.time_ms, Deadline.after(_SILENCE_S, bus.clock), what="a heartbeat"
            )  # fmt: skip
        except DeadlineExceeded:
            return False
    finally:
        view.close()
    return True


def claim_namespace(writer: TransactionalWriter, bus: Bus, tip: Tip, *, run_id: str, session: str, takeover: bool) -> None:
    """Say on `steps` that `session` owns the namespace from now on. `writer` has fenced every predecessor."""
    claim = SessionClaim(
        run_id=run_id,
        session=session,
        host=socket.gethostname(),
        pid=os.getpid(),
        takeover=takeover,
        tip_version=tip.version,
        tip_checkpoint=tip.checkpoint,
        time_ms=bus.clock.time_ms(),
    )
    with writer.transaction():
        writer.publish(STEPS, claim)
    logger.info("Session %s owns %s, run %s, tip version %d", session, bus.namespace.name, run_id, tip.version)


def identities(bus: Bus) -> dict[str, str]:
    """Names that do not come back when a cluster or topic is made anew: cluster id, and per topic its id and partition count."""
    from confluent_kafka import TopicCollection

    admin = bus.cluster.admin()
    metadata = admin.list_topics(timeout=READ_S)
    known = {"cluster": str(metadata.cluster_id)}
    physical = {bus.namespace.topic(topic): topic.name for topic in _KEPT_TOPICS if bus.namespace.topic(topic) in metadata.topics}
    for name, future in admin.describe_topics(TopicCollection(list(physical))).items():
        described = future.result()
        known[physical[name]] = f"{described.topic_id}/{len(described.partitions)}"
    return known
