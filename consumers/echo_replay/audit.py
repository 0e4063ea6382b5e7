"""The audit of a run: reads all records of its topics once, and proves or refutes each promise of docs/audit.md.

    steps ─▶ drops, weights, requests, replies, runs, dead letters ─▶ trajectories ─▶ drops that came meanwhile ─▶ checks

Reads committed records only, writes nothing, joins no group: a run may be audited while it goes on. One thread, the caller's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

from echo_bus.bus import Bus
from echo_bus.reading.decoding import Decoder
from echo_replay.books import SecondLook, close_books, samples_of
from echo_replay.lineage import check_chain, check_requests, check_seqs
from echo_replay.published import check_blobs, check_staleness, check_tags, check_versions
from echo_replay.raw_log import RawLog
from echo_replay.run_log import RunLog, read_ancestors, read_rest, read_steps, unknown_run
from echo_replay.signed import SignatureCheck, check_rewards
from echo_replay.trajectory_index import TrajectoryIndex, index_trajectories
from echo_replay.verdicts import AuditReport
from echo_schemas.errors import InvalidRecord
from echo_schemas.topics import TRAJECTORIES

logger = logging.getLogger(__name__)


def audit_run(bus: Bus, run_id: str) -> AuditReport:
    """Audit one run. Raises UserError if the log has no record of it; DeadlineExceeded, TransportError, RegistryError."""
    bus = replace(bus, run_id=run_id)
    started_s = bus.clock.monotonic_s()
    log = RunLog(run_id)
    read_steps(bus, log)
    with closing(read_rest(bus, log)) as drops:
        if not log.has_begun:
            raise unknown_run(bus, run_id)
        read_ancestors(bus, log)
        reading_s = bus.clock.monotonic_s()
        with RawLog(bus, bus.namespace.topic(TRAJECTORIES)) as trajectories:
            signed = None if bus.verifier is None else SignatureCheck(bus.verifier, bus.codec.ids)
            messages = trajectories.messages() if signed is None else signed.watch(trajectories.messages())
            index = index_trajectories(run_id, messages, bus.codec.ids, lows=trajectories.lows, ends=trajectories.ends)
            reading_s = bus.clock.monotonic_s() - reading_s
            logger.info("%d trajectories read in %.2f s", index.num_records, reading_s)
            log.late_drops = drops.read()
            return _report(bus, log, index, trajectories, signed, started_s=started_s, reading_s=reading_s)


def _report(
    bus: Bus,
    log: RunLog,
    index: TrajectoryIndex,
    trajectories: RawLog,
    signed: SignatureCheck | None,
    *,
    started_s: float,
    reading_s: float,
) -> AuditReport:
    samples = samples_of(log.steps)
    one_state, books = close_books(log, index, samples, lambda partition, offsets: _look(bus, trajectories, partition, offsets))
    findings = (
        one_state,
        check_seqs(log, samples),
        check_staleness(log, index, samples),
        check_versions(log),
        check_blobs(bus, log),
        check_tags(log, index, samples),
        check_requests(log, samples),
        check_chain(log),
        *([] if signed is None else [check_rewards(bus, log, samples, signed.finding(samples))]),
    )
    return AuditReport(
        run_id=log.run_id,
        findings=findings,
        counts=books.counts,
        num_steps=len(log.steps),
        num_trajectories=index.num_records,
        seconds=bus.clock.monotonic_s() - started_s,
        reading_s=reading_s,
    )


def _look(bus: Bus, trajectories: RawLog, partition: int, offsets: list[int]) -> Mapping[int, SecondLook]:
    """Decode some records as the learner does."""
    decoder = Decoder(bus, [TRAJECTORIES])
    decoder.set_num_partitions({bus.namespace.topic(TRAJECTORIES): trajectories.num_partitions})
    found: dict[int, SecondLook] = {}
    for raw in trajectories.between(partition, offsets):
        try:
            message = decoder.decode(raw)
        except InvalidRecord:
            found[raw.offset() or 0] = SecondLook.INVALID
        else:
            found[raw.offset() or 0] = SecondLook.NOT_OURS if message is None else SecondLook.SOUND
    return found
