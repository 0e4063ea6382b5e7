"""Scores a range of the past with another reward: every sample without a record of it gets one.

    history (undecoded) ─▶ without a record under the name? ─▶ chunks ─▶ scoring processes ─▶ records ─▶ sink

Memory: some chunks of messages for each process, the records waiting to be written, and 24 bytes a sample for the comparison (two values
and its group). Threads: the caller's, and one that writes, so that scoring never waits for a commit.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from echo_bus.clock import Clock
from echo_replay.history import Undecoded
from echo_replay.rescoring.inside import Answer
from echo_replay.rescoring.order import RescoreOrder
from echo_replay.rescoring.sinks import RewardSink
from echo_replay.rescoring.team import CHUNK, CHUNK_BYTES, Item, Judged, Team
from echo_runtime.garbage import seldom_collected
from echo_schemas.codec import Codec
from echo_schemas.records import Purpose, RewardOutcome
from echo_streams.intake import Identity
from echo_streams.scoring import Judgement, ended

TRIED = 16
"""If none of so many first samples gets a value, the reward counts as broken and nothing is written."""

# Write when so many records wait, or after so long.
_AT_ONCE = 5_000
_FLUSH_S = 2.0
_MOST_ERRORS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """After the first `num` samples: seconds in the function, their cost (the component `cost_usd`), and how many a judge's cache answered,
    at no cost."""

    num: int
    num_cached: int
    call_s: float
    cost_usd: float


@dataclass(slots=True, kw_only=True)
class Rescored:
    """The result. `num_known`: samples that had a record already. `stopped`: why the rest was not scored; empty: all were."""

    outcomes: Counter[RewardOutcome] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    num_known: int = 0
    num_unreadable: int = 0
    num_probes: int = 0
    cost_usd: float = 0.0
    stopped: str = ""
    table: ValueTable

    @property
    def num_written(self) -> int:
        """Samples that got a record now."""
        return self.outcomes.total()


class ValueTable:
    """For each sample with a value of the new reward: that value, the compared reward's value (NaN: none), and a number of its group."""

    def __init__(self) -> None:
        self._new, self._other, self._groups = array("d"), array("d"), array("q")
        self._numbers: dict[tuple[str, str], int] = {}
        self.num_other = 0

    def add(self, identity: Identity, new: float | None, other: float) -> None:
        self.num_other += not math.isnan(other)
        if new is None or math.isnan(new):
            return
        self._new.append(new)
        self._other.append(other)
        self._groups.append(self._numbers.setdefault((identity.group_id, identity.attempt), len(self._numbers)))

    def columns(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """New values, compared values, groups."""
        return np.array(self._new, np.float64), np.array(self._other, np.float64), np.array(self._groups, np.int64)


class NoSampleScored(Exception):
    """None of the first samples got a value; nothing was written. `answer`: the first one's."""

    def __init__(self, num: int, answer: Answer) -> None:
        super().__init__(f"{num} samples, no value: {answer.error}")
        self.num, self.answer = num, answer


def rescore(
    order: RescoreOrder,
    records: Iterable[Undecoded],
    team: Team,
    sink: RewardSink,
    *,
    codec: Codec,
    clock: Clock,
    tried: Callable[[Estimate], bool] = lambda _estimate: True,
) -> Rescored:
    """Score and write every sample without a record. `tried` is called once, after the first samples: it returns whether to go on. Raises
    NoSampleScored, UserError if the function cannot be imported, and as `records` and the sink do."""
    with seldom_collected(), ThreadPoolExecutor(1, thread_name_prefix="rescore") as thread:
        work = _Rescore(order, sink, codec, clock, thread)
        is_tried = False
        for judged in team.judge(_chunks(work.wanted(records))):
            work.take(judged)
            if not is_tried and work.num_answered >= TRIED:
                is_tried = True
                if not work.passes(tried):
                    return work.rescored
            if is_tried:
                work.flush(only_if_due=True)
        if is_tried or not work.num_answered or work.passes(tried):
            work.flush()
            work.settle()
            work.rescored.stopped = team.stopped
        return work.rescored


class _Rescore:
    def __init__(self, order: RescoreOrder, sink: RewardSink, codec: Codec, clock: Clock, thread: ThreadPoolExecutor) -> None:
        self._order, self._sink, self._codec, self._clock, self._thread = order, sink, codec, clock, thread
        self.rescored = Rescored(table=ValueTable())
        self.num_answered = 0
        self._call_s = 0.0
        self._num_cached = 0
        self._first_failed: Answer | None = None
        self._waiting: list[tuple[Item, bytes]] = []
        self._writing: Future[None] | None = None
        self._flushed_s = clock.monotonic_s()

    def wanted(self, records: Iterable[Undecoded]) -> Iterator[Item]:
        """The samples without a record of this name."""
        rescored = self.rescored
        for each in records:
            identity = each.identity
            if identity is None:
                rescored.num_unreadable += 1
                continue
            if identity.purpose is Purpose.PROBE:
                rescored.num_probes += 1
                continue
            other = each.rewards.get(self._order.compared, math.nan)
            known = self._sink.known(each)
            if known is not None:
                rescored.num_known += 1
                rescored.table.add(identity, known, other)
                continue
            yield Item(where=each.where, identity=identity, value=each.raw.value() or b"", compared=other)

    def take(self, judged: Sequence[Judged]) -> None:
        """Count answers and queue their records for writing."""
        for item, answer in judged:
            self.num_answered += 1
            self._call_s += answer.seconds
            self._num_cached += answer.is_cached
            if answer.outcome is None:
                self.rescored.num_unreadable += 1
                continue
            self.rescored.outcomes[answer.outcome] += 1
            self.rescored.cost_usd += answer.cost_usd
            if answer.outcome is not RewardOutcome.SCORED:
                self._first_failed = self._first_failed or answer
                error = answer.error or answer.outcome.value
                if error in self.rescored.errors or len(self.rescored.errors) < _MOST_ERRORS:
                    self.rescored.errors[error] += 1
            self.rescored.table.add(item.identity, answer.value, item.compared)
            self._waiting.append((item, answer.record or self._record(item, answer, answer.outcome)))

    def passes(self, tried: Callable[[Estimate], bool]) -> bool:
        """Whether to go on after the first samples. Raises NoSampleScored if none has got a value."""
        if self._first_failed is not None and not self.rescored.outcomes[RewardOutcome.SCORED]:
            raise NoSampleScored(self.num_answered, self._first_failed)
        cost_usd = self.rescored.cost_usd
        return tried(Estimate(num=self.num_answered, num_cached=self._num_cached, call_s=self._call_s, cost_usd=cost_usd))

    def flush(self, *, only_if_due: bool = False) -> None:
        """Start to write the waiting records, once the write under way is done. Raises that write's error."""
        now_s = self._clock.monotonic_s()
        if only_if_due and len(self._waiting) < _AT_ONCE and now_s < self._flushed_s + _FLUSH_S:
            return
        self.settle()
        if self._waiting:
            self._writing = self._thread.submit(self._sink.write, self._waiting)
        self._waiting, self._flushed_s = [], now_s

    def settle(self) -> None:
        """Wait for the write under way. Raises its error."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _record(self, item: Item, answer: Answer, outcome: RewardOutcome) -> bytes:
        """The record of a call that was ended, for which the scoring process made none."""
        judgement = Judgement(outcome=outcome, value=answer.value, error=answer.error, seconds=answer.seconds)
        if answer.value is not None:
            judgement = ended(answer.value, answer.seconds)
        return self._codec.encode(self._order.record(item.identity, item.where, judgement, self._clock.time_ms()))


def _chunks(items: Iterator[Item]) -> Iterator[list[Item]]:
    chunk: list[Item] = []
    num_bytes = 0
    for item in items:
        chunk.append(item)
        num_bytes += len(item.value)
        if len(chunk) >= CHUNK or num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk
