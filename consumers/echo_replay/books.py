"""The books of one run: the state of each trajectory record and of each seq. Pure, except that `look` reads unaccounted records again.

    trained   ── batch columns of the reports ──┐
    dropped   ── records of `drops` ────────────┼──▶ one bit each per record ──▶ none: open, or lost; two: broken
    dead      ── copies that the learner made ──┘

A record without a state is open while its seq is open, or while it lies behind the end of what the newest report says was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from echo_replay.run_log import RunLog
from echo_replay.steps import Ints, Step
from echo_replay.trajectory_index import Kind, PartitionIndex, TrajectoryIndex
from echo_replay.verdicts import Finding, Promise
from echo_schemas.records import Coordinates, Drop

Bits = npt.NDArray[np.uint8]

# An offset needs fewer bits than this.
OFFSET_BITS = 44

Whole = TypeVar("Whole", int, Ints)


def place_code(partition: Whole, offset: Whole) -> Whole:
    """Coordinates as one number; of numbers or of arrays."""
    return partition << OFFSET_BITS | offset


class State(IntFlag):
    """What the learner's records say of a trajectory record."""

    TRAINED = 1
    DROPPED = 2
    DEAD = 4


class SecondLook(IntFlag):
    """What the codec says of a record without a state."""

    SOUND = 1
    INVALID = 2
    NOT_OURS = 4


Look = Callable[[int, list[int]], Mapping[int, SecondLook]]
"""`look(partition, offsets)`: fetches the records there and decodes them as the learner would."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """All samples of all steps, one after another. `steps`: number of the sample's step among the run's steps."""

    steps: Ints
    versions: Ints
    partitions: Ints
    offsets: Ints
    seqs: Ints
    indices: Ints
    attempts: Ints

    @property
    def codes(self) -> Ints:
        """`place_code` of each sample; -1 in a topic that was recreated later."""
        return np.where(self.offsets < 0, -1, place_code(self.partitions, self.offsets))


@dataclass(slots=True)
class Books:
    """The result. `states`: by partition, the bits of each record in the index's order. `counts`: records by state."""

    states: dict[int, Bits] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


def samples_of(steps: Iterable[Step]) -> Samples:
    """The columns of all batches. Offsets in a topic that was recreated later become -1, so that they match no record."""
    all_steps = list(steps)
    since = made_anew(all_steps)

    def joined(parts: list[Ints]) -> Ints:
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    sizes = [len(step.offsets) for step in all_steps]
    samples = Samples(
        steps=np.repeat(np.arange(len(all_steps)), sizes),
        versions=np.repeat(np.array([step.version for step in all_steps], np.int64), sizes),
        partitions=joined([step.partitions for step in all_steps]),
        offsets=joined([step.offsets for step in all_steps]),
        seqs=joined([step.seqs for step in all_steps]),
        indices=joined([step.indices for step in all_steps]),
        attempts=joined([step.attempts for step in all_steps]),
    )
    for partition, version in since.items():
        gone = (samples.partitions == partition) & (samples.versions < version)
        samples = replace(samples, offsets=np.where(gone, -1, samples.offsets))
    return samples


def made_anew(steps: Sequence[Step]) -> dict[int, int]:
    """By partition of `trajectories`: the first version whose coordinates name the present log. Contains the partitions that were read to a
    lower offset than before. That happens if the topic was recreated or cut off and the run was continued with `--skip`."""
    read_to: dict[int, int] = {}
    found: dict[int, int] = {}
    for step in steps:
        for position in step.report.positions:
            if position.read_to < read_to.get(position.partition, 0):
                found[position.partition] = step.version
            read_to[position.partition] = position.read_to
    return found


def close_books(log: RunLog, index: TrajectoryIndex, samples: Samples, look: Look) -> tuple[Finding, Books]:
    """Check that every trajectory record is in exactly one state, or open."""
    finding = Finding(Promise.ONE_STATE, num_looked_at=index.num_records)
    books = Books(states={number: np.zeros(len(each.offsets), np.uint8) for number, each in index.partitions.items()})
    _enter_trained(finding, books, index, samples)
    since = made_anew(log.steps)
    early = {(drop.what.partition, drop.what.offset) for drop in log.drops if drop.what is not None}
    _enter_dropped(finding, books, index, [drop for drop in log.drops if drop.what is not None], since, may_be_beyond=False)
    late = [drop for drop in log.late_drops if drop.what is not None and (drop.what.partition, drop.what.offset) not in early]
    _enter_dropped(finding, books, index, late, since, may_be_beyond=True)
    _enter_dead(books, index, log.dead)
    # With other settings the learner may have accepted a refused record later: it then has the state that it got there.
    _enter_dead(books, index, log.refused, only_without_state=True)
    _two_states(finding, books, index)
    _stateless(finding, books, index, log, look)
    _note_gaps(finding, log)
    return finding, books


def unknown_samples(log: RunLog) -> str | None:
    """Why some steps' samples are unknown; None if all are known."""
    if log.inherited.doubt:
        return log.inherited.doubt
    if not log.has_whole_history:
        return f"the reports before version {log.steps[0].version} were removed by retention"
    missing = [step for step in log.steps if step.missing]
    return f"the batch of version {missing[0].version} could not be read ({missing[0].missing})" if missing else None


def unknown_records(log: RunLog) -> str | None:
    """Why some trained or dropped seqs are unknown; None if all are known."""
    return unknown_samples(log) or ("retention has removed drops" if log.has_lost_drops else None)


def _enter_trained(finding: Finding, books: Books, index: TrajectoryIndex, samples: Samples) -> None:
    codes = samples.codes
    unique, first, counts = np.unique(codes, return_index=True, return_counts=True)
    counts[unique < 0] = 1
    for code, at in zip(unique[counts > 1].tolist(), first[counts > 1].tolist(), strict=True):
        versions = samples.versions[codes == code].tolist()
        finding.broken(
            "A record was trained more than once.", **_place(samples, at), seq=int(samples.seqs[at]), versions=versions
        )  # fmt: skip
    num_removed = 0
    for number in np.unique(samples.partitions).tolist():
        mine = np.flatnonzero(samples.partitions == number)
        partition = index.partitions.get(number)
        if partition is None:
            finding.broken(
                "A step trained a record of a partition that is not there.", partition=number, version=int(samples.versions[mine[0]])
            )
            continue
        places, found = partition.find(samples.offsets[mine])
        removed = ~found & (samples.offsets[mine] < partition.low)
        num_removed += int(removed.sum())
        for at in mine[~found & ~removed].tolist():
            finding.broken(
                "A step trained a record that is not in the log.", **_place(samples, at), version=int(samples.versions[at])
            )  # fmt: skip
        there, where = mine[found], places[found]
        books.states[number][where] |= np.uint8(State.TRAINED)
        same = (
            (partition.seqs[where] == samples.seqs[there])
            & (partition.indices[where] == samples.indices[there])
            & (partition.attempts[where] == samples.attempts[there])
        )
        for at in there[~same].tolist():
            finding.broken(
                "The record is another sample than the one that the report says it trained.",
                **_place(samples, at),
                version=int(samples.versions[at]),
                seq=int(samples.seqs[at]),
            )
        for at in there[partition.kinds[where] == Kind.OTHER_PURPOSE].tolist():
            finding.broken(
                "A sample of an evaluation or a probe was trained.", **_place(samples, at), version=int(samples.versions[at])
            )  # fmt: skip
    if num_removed:
        finding.gap(f"{num_removed} trained records are not in the log any more")


def _enter_dropped(
    finding: Finding, books: Books, index: TrajectoryIndex, drops: list[Drop], since: Mapping[int, int], *, may_be_beyond: bool
) -> None:
    seen: set[tuple[int, int]] = set()
    num_removed = 0
    for number, offsets, mine in _by_partition([drop.what for drop in drops if drop.what is not None], drops):
        partition = index.partitions.get(number)
        if partition is None:
            finding.broken("A drop names a partition that is not there.", partition=number, offset=int(offsets[0]))
            continue
        places, found = partition.find(offsets)
        for offset, place, is_there, drop in zip(offsets.tolist(), places.tolist(), found.tolist(), mine, strict=True):
            if drop.learner_version < since.get(number, 0):
                num_removed += 1
                continue
            where = {"partition": number, "offset": offset, "seq": drop.seq, "why": drop.why.value}
            if (number, offset) in seen or (is_there and books.states[number][place] & State.DROPPED):
                finding.broken("A record was dropped twice.", **where)
            seen.add((number, offset))
            if is_there:
                books.states[number][place] |= np.uint8(State.DROPPED)
                if partition.seqs[place] != drop.seq:
                    finding.broken("A drop names a record of another seq.", **where, record_seq=int(partition.seqs[place]))
                elif partition.kinds[place] == Kind.OTHER_PURPOSE:
                    finding.broken("A drop names a sample that is not for training.", **where)
            elif offset < partition.low:
                num_removed += 1
            elif offset < partition.end or not may_be_beyond:
                finding.broken("A drop names a record that is not in the log.", **where)
    if num_removed:
        finding.gap(f"{num_removed} dropped records are not in the log any more")


def _enter_dead(books: Books, index: TrajectoryIndex, dead: list[Coordinates], *, only_without_state: bool = False) -> None:
    for number, offsets, _ in _by_partition(dead, dead):
        partition = index.partitions.get(number)
        if partition is not None:
            places, found = partition.find(offsets)
            places = places[found]
            if only_without_state:
                places = places[books.states[number][places] == 0]
            books.states[number][places] |= np.uint8(State.DEAD)


def _two_states(finding: Finding, books: Books, index: TrajectoryIndex) -> None:
    for number, bits in books.states.items():
        partition = index.partitions[number]
        several = np.flatnonzero((bits > 0) & (bits & (bits - 1) > 0))
        for at in several.tolist():
            names = [state.name or "" for state in State if bits[at] & state]
            finding.broken(
                f"A record is {' and '.join(name.lower() for name in names)}.",
                partition=number,
                offset=int(partition.offsets[at]),
                seq=int(partition.seqs[at]),
            )


def _stateless(finding: Finding, books: Books, index: TrajectoryIndex, log: RunLog, look: Look) -> None:
    """Sort the records without a state into: open, not for training, or lost."""
    counts = dict.fromkeys(("trained", "dropped", "dead-lettered", "open", "not_for_training", "not_ours", "unaccounted"), 0)
    closed, read_to, doubt = _closed_seqs(log), log.read_to, unknown_records(log)
    for number, bits in books.states.items():
        partition = index.partitions[number]
        for name, state in (("trained", State.TRAINED), ("dropped", State.DROPPED), ("dead-lettered", State.DEAD)):
            counts[name] += int(((bits & state) > 0).sum())
        other = (bits == 0) & (partition.kinds == Kind.OTHER_PURPOSE)
        counts["not_for_training"] += int(other.sum())
        silent = (bits == 0) & ~other
        unread = silent & (partition.offsets >= read_to.get(number, 0))
        counts["open"] += int(unread.sum())
        left = np.flatnonzero(silent & ~unread)
        _look_again(finding, counts, partition, number, left, np.isin(partition.seqs[left], closed), look, doubt)
    books.counts = counts
    if counts["unaccounted"] and doubt:
        finding.gap(f"{counts['unaccounted']} records have no state that is still in the log: {doubt}")


def _look_again(
    finding: Finding,
    counts: dict[str, int],
    partition: PartitionIndex,
    number: int,
    left: Ints,
    is_closed: npt.NDArray[np.bool_],
    look: Look,
    doubt: str | None,
) -> None:
    """Look at the records that the learner has read without giving them a state."""
    verdicts = look(number, partition.offsets[left].tolist()) if len(left) else {}
    for at, closed in zip(left.tolist(), is_closed.tolist(), strict=True):
        offset, seq = int(partition.offsets[at]), int(partition.seqs[at])
        verdict = verdicts.get(offset, SecondLook.INVALID)
        if verdict is SecondLook.NOT_OURS:
            counts["not_ours"] += 1
        elif verdict is SecondLook.SOUND and not closed:
            counts["open"] += 1
        else:
            counts["unaccounted"] += 1
            if doubt is None:
                says = "no record that can be read, and not in the dead letters" if verdict is SecondLook.INVALID else "of a closed seq"
                finding.broken(
                    f"The learner has read a record and said nothing of it: it is {says}.", partition=number, offset=offset, seq=seq
                )


def _closed_seqs(log: RunLog) -> Ints:
    """Seqs that were trained or dropped when the newest report was written."""
    trained = [step.seqs for step in log.steps]
    dropped = [drop.seq for drop in log.drops if drop.what is None and drop.learner_version <= log.tip]
    return np.unique(np.concatenate([*trained, np.array(dropped, np.int64), np.array(sorted(log.inherited.closed), np.int64)]))


def _note_gaps(finding: Finding, log: RunLog) -> None:
    for step in log.steps:
        if step.missing and step.corrupt:
            finding.broken(f"The batch of a step cannot be read: {step.missing}", version=step.version)
        elif step.missing:
            finding.gap(f"the batch of version {step.version} was removed by retention")
    if not log.has_whole_history:
        finding.gap(f"the reports before version {log.steps[0].version} were removed by retention")
    for topic in ("steps", "drops"):
        if number := log.unreadable.get(topic):
            finding.gap(f"{number} messages on {topic} are no records")


def _by_partition(places: list[Coordinates], items: list[Drop] | list[Coordinates]) -> Iterable[tuple[int, Ints, list[Drop]]]:
    """`items` and the offsets of `places`, partition by partition."""
    order: dict[int, list[int]] = {}
    for position, place in enumerate(places):
        order.setdefault(place.partition, []).append(position)
    for number, positions in sorted(order.items()):
        offsets = np.array([places[position].offset for position in positions], np.int64)
        yield number, offsets, [items[position] for position in positions]  # type: ignore[misc]  # a list of one of the two


def _place(samples: Samples, at: int) -> dict[str, int]:
    return {"partition": int(samples.partitions[at]), "offset": int(samples.offsets[at])}
