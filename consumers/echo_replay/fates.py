"""The fate of each trajectory record of a run, by its coordinates. A lookup that trusts the log; the audit checks it. Pure.

    batches of the reports ─▶ trained: step, advantage
    records of `drops`     ─▶ dropped: why, when                   one lookup: Fates.of(partition, offset, …)
    dead letters           ─▶ dead

Memory: about forty bytes for each record that has a fate.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from echo_replay.books import OFFSET_BITS, made_anew, place_code, samples_of
from echo_replay.selection import Fate
from echo_replay.steps import Ints, Step
from echo_schemas.converters import maker_of
from echo_schemas.records import Coordinates, Drop, DropReason, Purpose

# So many samples lie ready for a reader that goes on in the order of the log.
_NEAR = 512
_REASONS = tuple(DropReason)
_REASON_CODES = {reason: code for code, reason in enumerate(_REASONS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The drop of a record. `learner_version`: the learner's version at that time. `of_group`: the whole seq was dropped."""

    why: DropReason
    learner_version: int
    time_ms: int
    detail: str = ""
    of_group: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BookEntry:
    """A record's fate; `step` and `advantage` if it was trained, `drop` if it was dropped."""

    fate: Fate
    step: int | None = None
    advantage: float | None = None
    drop: Dropped | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DropTable:
    """Every drop in the order of the log, first the drops of records, then those of whole seqs. One entry a drop in each column.

    `partitions`, `offsets`: of the record; -1 if a whole seq was dropped. `reasons`: positions in `DropReason`. `sampled_by`: the oldest
    version that made one of its tokens; -1, and `num_tokens` 0, if the drop does not name it."""

    partitions: Ints
    offsets: Ints
    seqs: Ints
    reasons: Ints
    versions: Ints
    times_ms: Ints
    sampled_by: Ints
    num_tokens: Ints
    workers: tuple[str, ...]
    """The worker that sampled the record, if that is the reason of the drop; else empty."""
    details: tuple[str, ...]


_make_entry = maker_of(BookEntry)
_OPEN = BookEntry(fate=Fate.OPEN)
_DEAD = BookEntry(fate=Fate.DEAD)
_NOT_TRAINED = {Purpose.EVAL: BookEntry(fate=Fate.EVALUATED), Purpose.PROBE: BookEntry(fate=Fate.PROBED)}


class _Drops:
    """Drops in columns, in the order of the log. Of several drops with one key the first counts."""

    def __init__(self) -> None:
        self._keys, self._reasons, self._versions, self._times, self._details, self._workers = (array(kind) for kind in "qbiqii")
        self._sampled_by, self._num_tokens = array("i"), array("i")
        self._texts: dict[str, int] = {"": 0}
        self._by_text: list[str] = [""]
        self._order: Ints | None = None
        self._sorted: Ints = np.zeros(0, np.int64)

    def add(self, key: int, drop: Drop) -> None:
        self._keys.append(key)
        self._reasons.append(_REASON_CODES[drop.why])
        self._versions.append(drop.learner_version)
        self._times.append(drop.time_ms)
        self._details.append(self._number(drop.detail or ""))
        self._workers.append(self._number(drop.worker_id or ""))
        self._sampled_by.append(-1 if drop.version is None else drop.version)
        self._num_tokens.append(drop.num_tokens)
        self._order = None

    def keys(self) -> Ints:
        return np.array(self._keys, np.int64)

    def columns(self) -> list[Ints]:
        """Reasons, versions, times, sampling versions, numbers of tokens."""
        columns = (self._reasons, self._versions, self._times, self._sampled_by, self._num_tokens)
        return [np.array(column, np.int64) for column in columns]

    def texts(self) -> tuple[list[str], list[str]]:
        """Workers, details."""
        return [self._by_text[at] for at in self._workers], [self._by_text[at] for at in self._details]

    def _number(self, text: str) -> int:
        if text not in self._texts:
            self._texts[text] = len(self._by_text)
            self._by_text.append(text)
        return self._texts[text]

    def find(self, key: int, *, of_group: bool) -> Dropped | None:
        if self._order is None:
            keys = self.keys()
            self._order = np.argsort(keys, kind="stable")
            self._sorted = keys[self._order]
        place = int(self._sorted.searchsorted(key))
        if place == len(self._sorted) or self._sorted[place] != key:
            return None
        at = int(self._order[place])
        return Dropped(
            why=_REASONS[self._reasons[at]],
            learner_version=self._versions[at],
            time_ms=self._times[at],
            detail=self._by_text[self._details[at]],
            of_group=of_group,
        )


class Fates:
    """The books of one run. One thread calls the `add_*` methods; any thread may look up, which takes the lock for a moment."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._steps: list[Step] = []
        self._codes: Ints = np.zeros(0, np.int64)
        self._versions: Ints = np.zeros(0, np.int64)
        self._seqs: Ints = np.zeros(0, np.int64)
        self._advantages = np.zeros(0, np.float32)
        self._since: dict[int, int] = {}
        self._records, self._groups = _Drops(), _Drops()
        self._record_seqs = array("q")
        self._dead: set[int] = set()
        # Readers mostly ask in the order of the log, so the next samples lie ready in plain lists: codes, steps, advantages. Searching
        # in arrays takes three times as long.
        self._near: tuple[list[int], list[int], list[float]] = [], [], []
        self._place, self._end = 0, 0
        """Where the next sample is in `_near`, and where in the arrays the one is that follows when `_near` is used up."""

    def add_steps(self, steps: Sequence[Step]) -> None:
        """Add steps, which follow the earlier ones."""
        if not steps:
            return
        # Only one thread adds, so sorting needs no lock; exchanging the columns does.
        self._steps += steps
        samples = samples_of(self._steps)
        codes = samples.codes
        order = np.argsort(codes, kind="stable")
        advantages = np.concatenate([step.advantages for step in self._steps])[order]
        since = made_anew(self._steps)
        with self._lock:
            self._codes, self._versions, self._seqs = codes[order], samples.versions[order], samples.seqs[order]
            self._advantages, self._since = advantages, since
            self._near, self._place, self._end = ([], [], []), 0, 0

    def add_drops(self, drops: Iterable[Drop]) -> None:
        """Add drops, in the order of the log. Add the steps first."""
        with self._lock:
            for drop in drops:
                if drop.what is None:
                    self._groups.add(drop.seq, drop)
                elif drop.learner_version >= self._since.get(drop.what.partition, 0):
                    self._records.add(place_code(drop.what.partition, drop.what.offset), drop)
                    self._record_seqs.append(drop.seq)

    def add_dead(self, places: Iterable[Coordinates]) -> None:
        """Add records that the learner copied to the dead letters."""
        with self._lock:
            self._dead.update(place_code(place.partition, place.offset) for place in places)

    def of(self, partition: int, offset: int, purpose: Purpose | None, seq: int | None = None) -> BookEntry:
        """The fate of the record at (partition, offset). `purpose` and `seq`: as in the record; None if it is unreadable."""
        with self._lock:
            code = place_code(partition, offset)
            if (sample := self._trained(code)) is not None:
                step, advantage = sample
                return _make_entry(fate=Fate.TRAINED, step=step, advantage=advantage, drop=None)
            if (drop := self._records.find(code, of_group=False)) is not None:
                return BookEntry(fate=Fate.DROPPED, drop=drop)
            if code in self._dead:
                return _DEAD
            if purpose is not None and purpose in _NOT_TRAINED:
                return _NOT_TRAINED[purpose]
            if purpose is Purpose.TRAIN and seq is not None and (drop := self._groups.find(seq, of_group=True)) is not None:
                return BookEntry(fate=Fate.DROPPED, drop=drop)
            return _OPEN

    def _trained(self, code: int) -> tuple[int, float] | None:
        """Step and advantage of the record with this code, if it was trained."""
        codes, versions, advantages = self._near
        place = self._place
        if place < len(codes) and codes[place] == code:
            self._place = place + 1
            return versions[place], advantages[place]
        at = int(self._codes.searchsorted(code))
        if at == len(self._codes) or self._codes[at] != code:
            return None
        if at == self._end:
            near = slice(at, at + _NEAR)
            self._near = self._codes[near].tolist(), self._versions[near].tolist(), self._advantages[near].tolist()
            self._place, self._end = 1, at + _NEAR
        else:
            self._end = at + 1
        return int(self._versions[at]), float(self._advantages[at])

    def drop_of_group(self, seq: int) -> Dropped | None:
        """The drop of a whole seq, if there is one."""
        with self._lock:
            return self._groups.find(seq, of_group=True)

    def places_of_seq(self, seq: int) -> list[tuple[int, int]]:
        """(partition, offset) of every record of a seq that has a fate, in ascending order."""
        with self._lock:
            dropped = self._records.keys()[np.array(self._record_seqs, np.int64) == seq]
            found = np.unique(np.concatenate([self._codes[self._seqs == seq], dropped]))
            return [(int(code >> OFFSET_BITS), int(code & ((1 << OFFSET_BITS) - 1))) for code in found.tolist() if code >= 0]

    def places_of_steps(self, first: int, last: int) -> dict[int, Ints]:
        """The offsets, ascending, of every sample of the steps that made the versions `first` to `last`, by partition."""
        with self._lock:
            codes = self._codes[(self._versions >= first) & (self._versions <= last) & (self._codes >= 0)]
            partitions, offsets = codes >> OFFSET_BITS, codes & ((1 << OFFSET_BITS) - 1)
            return {int(number): offsets[partitions == number] for number in np.unique(partitions).tolist()}

    def drops(self) -> DropTable:
        """All drops, copied."""
        with self._lock:
            records, groups = self._records, self._groups
            codes = records.keys()
            none = np.full(len(groups.keys()), -1, np.int64)
            reasons, versions, times_ms, sampled_by, num_tokens = (
                np.concatenate(both) for both in zip(records.columns(), groups.columns(), strict=True)
            )
            workers, details = (one + other for one, other in zip(records.texts(), groups.texts(), strict=True))
            return DropTable(
                partitions=np.concatenate([codes >> OFFSET_BITS, none]),
                offsets=np.concatenate([codes & ((1 << OFFSET_BITS) - 1), none]),
                seqs=np.concatenate([np.array(self._record_seqs, np.int64), groups.keys()]),
                reasons=reasons,
                versions=versions,
                times_ms=times_ms,
                sampled_by=sampled_by,
                num_tokens=num_tokens,
                workers=tuple(workers),
                details=tuple(details),
            )
