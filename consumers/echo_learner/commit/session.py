"""Ownership: one session of a learner owns a namespace, and its claim on `steps` says which.

    refuse while another heartbeats ─▶ take over the transactional id (fences) ─▶ claim on `steps` ─▶ read `steps` to its end ─▶ the tip

The tip is the newest committed StepReport of the run. A step exists once a checkpoint holds it, and is public once its report is committed.
Drops that are published without a step come with the claim again, which then names the checkpoint that holds them (`tip_checkpoint`).
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from echo_bus.bus import Bus
from echo_bus.client.transactions import TransactionalWriter
from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded, ProducerFenced, TransportError
from echo_bus.message import Message
from echo_bus.reading.view import CompactedView
from echo_runtime import ownership
from echo_runtime.process import StopSignal
from echo_schemas.errors import UserError
from echo_schemas.records import Progress, SessionClaim, StepReport
from echo_schemas.topics import PROGRESS, REWARDS, STEPS, TRAJECTORIES, WEIGHTS

logger = logging.getLogger(__name__)
READ_S = 60.0
# A successor claims as soon as it has fenced its predecessor, which takes some milliseconds.
_LOOKS_FOR_SUCCESSOR = 5
_LOOK_S = 0.2
# Differences of clocks that are not reported: a commit takes up to a second while a broker fails over.
_CLOCK_TOLERANCE_S = 5.0
# Records of `steps` that are read first, from its end; four times as many each time that none is the run's.
_TAIL = 64
# The topics whose positions and records a checkpoint builds on.
_KEPT_TOPICS = (TRAJECTORIES, REWARDS, STEPS, WEIGHTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tip:
    """The end of `steps`: the run's newest report, and the newest claim of any run with the broker's time of it.

    `drops_checkpoint`: the checkpoint that a later claim of the run names; its drops and reports are public.
    """

    report: StepReport | None
    claim: SessionClaim | None
    claim_appended_ms: int = 0
    drops_checkpoint: str | None = None

    @property
    def version(self) -> int:
        """Training steps that are public."""
        return 0 if self.report is None else self.report.version

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint of the newest public step, with the drops that were published since."""
        if self.drops_checkpoint is not None:
            return self.drops_checkpoint
        return None if self.report is None else self.report.checkpoint


def new_session(start: str = "") -> str:
    """A unique name of a session. It begins with `start`, which the roles that were started together share."""
    return start + secrets.token_hex(4)


def read_tip(bus: Bus, run_id: str) -> Tip:
    """Read `steps` from its end backwards until the run's newest report and a claim are found. Committed records only.

    Raises DeadlineExceeded, TopicMissing, NotAuthorized, ClusterUnreachable.
    """
    with closing(_every_run(bus).look([STEPS])) as reader:
        bounds = reader.bounds()
        lows, ends = ({place: found[which] for place, found in bounds.items()} for which in (0, 1))
        window = _TAIL
        while True:
            starts = {place: max(lows[place], end - window) for place, end in ends.items()}
            reader.start(starts)
            tip = _scan(reader.read_to_end(Deadline.after(READ_S, bus.clock), ends), run_id)
            if (tip.report is not None and tip.claim is not None) or starts == lows:
                return tip
            window *= 4


def _every_run(bus: Bus) -> Bus:
    """A bus that reads the records of all runs: a namespace holds one running pipeline, so claims of other runs count."""
    return replace(bus, run_id=None)


def _scan(batches: Iterable[list[Message]], run_id: str) -> Tip:
    tip = Tip(report=None, claim=None)
    for messages in batches:
        for message in messages:
            record = message.record
            if isinstance(record, StepReport) and record.run_id == run_id:
                tip = replace(tip, report=record, drops_checkpoint=None)
            elif isinstance(record, SessionClaim):
                tip = replace(tip, claim=record, claim_appended_ms=message.timestamp_ms)
                if record.run_id == run_id and record.tip_checkpoint is not None and record.tip_version >= tip.version:
                    tip = replace(tip, drops_checkpoint=record.tip_checkpoint)
    return tip


def refuse_if_alive(bus: Bus, claim: SessionClaim | None, *, run_id: str, takeover: bool) -> None:
    """Raise UserError if the session that owns the namespace still heartbeats, unless it is of this run and to be taken over.

    A session of another run cannot be taken over: its workers and reward processes would stay in this namespace's consumer groups, and
    commit this run's records unread.
    """
    if claim is None or (takeover and claim.run_id == run_id) or not is_alive(bus, claim):
        return
    hint = "Stop it first, or use another [kafka] namespace: --takeover is for a learner of the same run."
    if claim.run_id == run_id:
        hint = "Stop it first, use another [kafka] namespace, or start this one with --takeover, which fences it."
    raise UserError(
        f"A learner is alive in this namespace: run {claim.run_id!r}, process {claim.pid} on {claim.host}, session {claim.session}.",
        hint=hint,
    )


def is_alive(bus: Bus, claim: SessionClaim) -> bool:
    """Whether the session of `claim` heartbeats. Waits `SILENCE_S` for a new record, unless the process is known to be gone.

    The records' times are not compared, since the clocks of two machines may differ by any amount.
    """
    if claim.machine and claim.machine == this_machine() and not _is_running(claim.pid):
        return False
    with closing(watch_progress(bus)) as view:
        last = view.get(claim.run_id)
        if last is None or last.session != claim.session:
            return False
        try:
            view.wait_for(
                claim.run_id,
                lambda progress: progress is not last and progress.session == claim.session,
                Deadline.after(ownership.SILENCE_S, bus.clock),
                what="a heartbeat",
            )
        except DeadlineExceeded:
            return False
    return True


def find_successor(bus: Bus, run_id: str, stop: StopSignal, *, known: frozenset[str]) -> SessionClaim | None:
    """The claim of a session that is not `known`, if one comes within a second: a successor claims right after it has fenced us.

    A producer may also die of a time-out; then no claim comes. Raises as `read_tip`.
    """
    for _ in range(_LOOKS_FOR_SUCCESSOR):
        claim = read_tip(bus, run_id).claim
        if claim is not None and claim.session not in known:
            return claim
        stop.wait(_LOOK_S)
    return None


def refuse_successor(successor: SessionClaim | None, cause: TransportError | None = None) -> None:
    """Raise UserError from `cause` if another session owns the namespace now."""
    if successor is not None:
        whose = f"process {successor.pid} on {successor.host}, session {successor.session}"
        raise UserError(f"Another learner has taken this namespace over: {whose}. This one ends.") from cause


def check_clock(tip: Tip) -> float:
    """Seconds that this machine's clock is behind the broker's, by our own claim, the newest of `tip`; too high by the time of a commit.

    Logs a warning if the clocks differ by much.
    """
    skew_s = 0.0 if tip.claim is None else (tip.claim_appended_ms - tip.claim.time_ms) / 1000
    if abs(skew_s) > _CLOCK_TOLERANCE_S:
        logger.warning(
            "This machine's clock and the broker's differ by %.0f s (ours is %s). Deadlines of requests, retention and times in reports go "
            "by them: set them alike (NTP). Ownership of the run does not depend on it.",
            abs(skew_s),
            "behind" if skew_s > 0 else "ahead",
        )
    return skew_s


def this_machine() -> str:
    """The scope of process ids: this boot of this kernel and the namespace of processes. Empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def watch_progress(bus: Bus) -> CompactedView[Progress]:
    """`progress` of the learners of every run. The caller closes it."""
    return _every_run(bus).view(PROGRESS, Progress)


def claim_namespace(writer: TransactionalWriter, bus: Bus, tip: Tip, *, run_id: str, session: str, takeover: bool) -> SessionClaim:
    """Write to `steps` that `session` owns the namespace from now on. `writer` has fenced every predecessor.

    `tip` was read after the fencing, which may have completed a predecessor's transaction: the claim must name the newest checkpoint.
    """
    claim = SessionClaim(
        run_id=run_id,
        session=session,
        host=socket.gethostname(),
        pid=os.getpid(),
        takeover=takeover,
        tip_version=tip.version,
        tip_checkpoint=tip.checkpoint,
        time_ms=bus.clock.time_ms(),
        machine=this_machine(),
    )
    with writer.transaction() as transaction:
        transaction.publish(STEPS, claim)
    logger.info("Session %s owns %s, run %s, tip version %d", session, bus.namespace.name, run_id, tip.version)
    return claim


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


class Rivals:
    """Sessions other than `session` whose heartbeats were read after it began: the cluster tells a fenced learner only when it commits.

    Threads: the view's thread of `progress` notes other sessions; the learner's thread calls `check`, which then reads the log.
    """

    def __init__(self, progress: CompactedView[Progress], session: str, newest_claim: Callable[[], SessionClaim | None]) -> None:
        """`progress`: of every run of the namespace; the caller closes it. `newest_claim` reads the log."""
        self._session = session
        self._newest_claim = newest_claim
        self._known = {session}
        self._heard: str | None = None
        progress.on_change(self._note)

    def check(self) -> None:
        """Raise ProducerFenced if another session heartbeats and the newest claim is not ours. A fenced session may heartbeat for a while.

        Raises TransportError if the log cannot be read.
        """
        heard, self._heard = self._heard, None
        if heard is None:
            return
        claim = self._newest_claim()
        if claim is not None and claim.session != self._session:
            raise ProducerFenced(
                f"Session {claim.session} of run {claim.run_id!r} has claimed this namespace; {self._session} commits nothing any more.",
                hint="Stop one of the two learners.",
            )
        self._known.add(heard)

    def _note(self, _: str, progress: Progress | None) -> None:
        if progress is not None and progress.session not in self._known:
            self._heard = progress.session
