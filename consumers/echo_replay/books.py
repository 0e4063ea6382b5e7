"""The books of one run: what became of each trajectory record, and of each seq. Pure, but for the second look at what nothing accounts for.

    trained   ── batch columns of the reports ──┐
    dropped   ── records of `drops` ────────────┼──▶ one bit each per record ──▶ none: open, or lost; two: broken
    dead      ── copies that the learner made ──┘

A record without a state is open while its seq is, or while it lies beyond what the newest report says was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from echo_replay.run_log import RunLog, Step
from echo_replay.trajectory_index import Ints, Kind, PartitionIndex, TrajectoryIndex
from echo_replay.verdicts import Finding, Promise
from echo_schemas.records import Coordinates, Drop

Bits = npt.NDArray[np.uint8]

# An offset needs fewer bits than this.
_OFFSET_BITS = 44


class State(IntFlag):
    """What was said of a record."""

    TRAINED = 1
    DROPPED = 2
    DEAD = 4


class SecondLook(IntFlag):
    """What the codec says of a record that nothing accounts for."""

    SOUND = 1
    INVALID = 2
    NOT_OURS = 4


Look = Callable[[int, list[int]], Mapping[int, SecondLook]]
"""`look(partition, offsets)`: fetches and decodes them as the learner would."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Samples:
    """All samples of all steps, one after another. `steps`: which of the run's steps a sample belongs to; `places` in the index."""

    steps: Ints
    versions: Ints
    partitions: Ints
    offsets: Ints
    seqs: Ints
    indices: Ints
    attempts: Ints


@dataclass(slots=True)
class Books:
    """What was found. `states`: bits of each record of each partition, in the index's order."""

    states: dict[int, Bits] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


def samples_of(steps: Iterable[Step]) -> Samples:
    """The columns of all batches. Offsets in a topic that was made anew since are negative: nothing is found there."""
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
    """Partitions of `trajectories` that were read to a lower offset than before, which happens to a topic that was made anew, or cut off,
    and was gone on with knowingly (`--skip`): the version from which on coordinates speak of the log that is there.
    """
    read_to: dict[int, int] = {}
    found: dict[int, int] = {}
    for step in steps:
        for position in step.report.positions:
            if position.read_to < read_to.get(position.partition, 0):
                found[position.partition] = step.version
            read_to[position.partition] = position.read_to
    return found


def close_books(log: RunLog, index: TrajectoryIndex, samples: Samples, look: Look) -> tuple[Finding, Books]:
    """Every trajectory record in exactly one state, or open."""
    finding = Finding(Promise.ONE_STATE, num_looked_at=index.num_records)
    books = Books(states={number: np.zeros(len(each.offsets), np.uint8) for number, each in index.partitions.items()})
    _enter_trained(finding, books, index, samples)
    since = made_anew(log.steps)
    early = {(drop.what.partition, drop.what.offset) for drop in log.drops if drop.what is not None}
    _enter_dropped(finding, books, index, [drop for drop in log.drops if drop.what is not None], since, may_be_beyond=False)
    late = [drop for drop in log.late_drops if drop.what is not None and (drop.what.partition, drop.what.offset) not in early]
    _enter_dropped(finding, books, index, late, since, may_be_beyond=True)
    _enter_dead(books, index, log.dead)
    _enter_refused(books, index, log.refused)
    _two_states(finding, books, index)
    _stateless(finding, books, index, log, look)
    _note_gaps(finding, log)
    return finding, books


def has_all_reports(log: RunLog) -> str | None:
    """Why it is not known what all steps trained, if so."""
    if log.inherited.doubt:
        return log.inherited.doubt
    if not log.has_whole_history:
        return f"the reports before version {log.steps[0].version} were removed by retention"
    missing = [step for step in log.steps if step.missing]
    return f"the batch of version {missing[0].version} could not be read ({missing[0].missing})" if missing else None


def _enter_trained(finding: Finding, books: Books, index: TrajectoryIndex, samples: Samples) -> None:
    codes = np.where(samples.offsets < 0, -1, samples.partitions << _OFFSET_BITS | samples.offsets)
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


def _enter_dead(books: Books, index: TrajectoryIndex, dead: list[Coordinates]) -> None:
    for number, offsets, _ in _by_partition(dead, dead):
        partition = index.partitions.get(number)
        if partition is not None:
            places, found = partition.find(offsets)
            books.states[number][places[found]] |= np.uint8(State.DEAD)


def _enter_refused(books: Books, index: TrajectoryIndex, refused: list[Coordinates]) -> None:
    """Under other settings what was refused may be what is asked: a record that was read again has the state that it got then."""
    for number, offsets, _ in _by_partition(refused, refused):
        partition = index.partitions.get(number)
        if partition is not None:
            places, found = partition.find(offsets)
            silent = places[found][books.states[number][places[found]] == 0]
            books.states[number][silent] |= np.uint8(State.DEAD)


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
    """Records of which nothing is said: open, of no concern to training, or lost."""
    counts = dict.fromkeys(("trained", "dropped", "dead-lettered", "open", "not_for_training", "not_ours", "unaccounted"), 0)
    closed, read_to = _closed_seqs(log), _read_to(log)
    doubt = has_all_reports(log) or _removed_drops(log)
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
    """Records that the learner has read and said nothing of."""
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
    """Seqs that were trained or dropped by the time of the newest report."""
    trained = [step.seqs for step in log.steps]
    dropped = [drop.seq for drop in log.drops if drop.what is None and drop.learner_version <= log.tip]
    return np.unique(np.concatenate([*trained, np.array(dropped, np.int64), np.array(sorted(log.inherited.closed), np.int64)]))


def _read_to(log: RunLog) -> dict[int, int]:
    """The offset after the last record that the newest report accounts for, by partition."""
    if not log.steps:
        return {}
    return {position.partition: position.read_to for position in log.steps[-1].report.positions}


def _removed_drops(log: RunLog) -> str | None:
    return "retention has removed drops" if any(log.lows.get("drops", {}).values()) else None


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
