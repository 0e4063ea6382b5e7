"""Requests that an earlier session, or the other mode, left in the log: the learner waits for them, sends them again, or closes them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_core.closed_seqs import ClosedSeqs, plan_resume
from echo_learner.commit.session import READ_S
from echo_learner.sequential.requesting import Ask
from echo_schemas.records import Purpose, RolloutRequest
from echo_schemas.topics import REQUESTS

# How far the clocks of two machines may differ: requests are read from so long before the checkpoint on.
_CLOCKS_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOver:
    """Every seq below `next_seq` that is not closed is in one of the three. `other_mode`: requested in the other mode."""

    next_seq: int
    on_their_way: tuple[Ask, ...]
    again: tuple[int, ...]
    other_mode: tuple[int, ...]


def find_left_over(shown: Iterable[RolloutRequest], closed: ClosedSeqs, *, version: int, is_sequential: bool, now_ms: int) -> LeftOver:
    """Sort `shown`, the training requests in the log, for a learner at `version` with `closed` seqs.

    A request is on its way if it asks for exactly `version` and its deadline has not passed; the newest of a seq counts. A seq below the
    highest requested one that is neither shown nor closed was never written, and is requested again.
    """
    newest: dict[int, RolloutRequest] = {}
    for request in shown:
        known = newest.get(request.seq)
        if known is None or (request.issued_ms, request.resends) >= (known.issued_ms, known.resends):
            newest[request.seq] = request
    resume = plan_resume(closed.floor, newest.keys() | closed.above)
    open_seqs = sorted({*resume.missing, *(seq for seq in newest if seq < resume.next_seq and seq not in closed)})
    on_their_way, again, other_mode = [], [], []
    for seq in open_seqs:
        found = newest.get(seq)
        if found is not None and found.exact is not is_sequential:
            other_mode.append(seq)
        elif found is None or (ask := _ask_of(found, version, now_ms)) is None:
            again.append(seq)
        else:
            on_their_way.append(ask)
    return LeftOver(next_seq=resume.next_seq, on_their_way=tuple(on_their_way), again=tuple(again), other_mode=tuple(other_mode))


def read_requests(bus: Bus, since_ms: int | None) -> list[RolloutRequest]:
    """The run's training requests, those written from `since_ms` on (None: all), in the order of each partition.

    Raises DeadlineExceeded, TransportError.
    """
    with closing(bus.look([REQUESTS])) as reader:
        ends = reader.start(None if since_ms is None else reader.offsets_at(max(0, since_ms - _CLOCKS_MS)))
        return [
            message.record
            for messages in reader.read_to_end(Deadline.after(READ_S, bus.clock), ends)
            for message in messages
            if isinstance(message.record, RolloutRequest) and message.record.purpose is Purpose.TRAIN
        ]


def _ask_of(request: RolloutRequest, version: int, now_ms: int) -> Ask | None:
    """None if the request is not on its way any more."""
    is_late = request.deadline_ms is not None and request.deadline_ms <= now_ms
    if request.required_version != version or request.correlation is None or is_late:
        return None
    return Ask(
        seq=request.seq,
        correlation=request.correlation,
        sent_ms=request.issued_ms,
        deadline_ms=request.deadline_ms,
        resends=request.resends,
    )
