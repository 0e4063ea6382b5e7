"""Finds changes of the log since a checkpoint: topics made anew or grown, and needed records that are gone.

    identities of the checkpoint and now, positions and bounds ─▶ nothing │ sentences for the refusal, lost seqs, and the state
                                                                            from which a learner with --skip goes on

A lost seq was requested and answered, is neither trained nor dropped, and some of its records are gone. If the learner had read these, the
checkpoint names the seq; otherwise `requests` shows it, a worker has finished it, and no record of it is left. Reads the log only where
records are gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.reading.reader import Place
from echo_bus.requests.issued_requests import IssuedRequest, read_issued
from echo_core.closed_seqs import ClosedSeqs
from echo_core.groups import AssemblyState
from echo_learner.commit.learner_state import LearnerState
from echo_learner.commit.session import READ_S
from echo_schemas.errors import UserError
from echo_schemas.partitioning import partition_of
from echo_schemas.records import Purpose, Trajectory
from echo_schemas.topics import REQUESTS, REWARDS, STEPS, TRAJECTORIES, WEIGHTS, Topic

# Without these a learner cannot know which steps are public, and a worker which weights.
_POINTERS = ("cluster", STEPS.name, WEIGHTS.name)
_RECORDS = (TRAJECTORIES, REWARDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogChange:
    """`what`: the changes that matter, as sentences; `lost`: seqs; `state`: to go on from with --skip."""

    what: tuple[str, ...]
    lost: tuple[int, ...]
    state: LearnerState

    @property
    def summary(self) -> str:
        """The sentences, and the lost seqs by number."""
        seqs = f"Lost seqs: {ranges(self.lost)} ({len(self.lost)} in all)." if self.lost else "No seq is lost by it."
        return f"{' '.join(self.what)} {seqs}"


# Where each partition of `trajectories` and `rewards` begins and ends now.
_Bounds = Mapping[Place, tuple[int, int]]


@dataclass(slots=True)
class _Damage:
    """Lost records, as sentences and seqs. `unread`: partitions of `trajectories` that lost records before the learner read them."""

    what: list[str]
    lost: set[int]
    unread: set[int]


def examine_log(bus: Bus, state: LearnerState, identities: Mapping[str, str]) -> LogChange:
    """Compare the log with the checkpoint `state`. `identities`: the present ones (`session.identities`).

    Raises UserError where --skip does not help: another cluster, `steps` or `weights` made anew, a missing topic.
    """
    made_anew = _made_anew(state, identities)
    what = [
        f"{name} has {_count(identities[name])} partitions and had {_count(state.identities[name])}."
        for name in (TRAJECTORIES.name, REWARDS.name)
        if name in state.identities and name not in made_anew and _count(identities[name]) != _count(state.identities[name])
    ]
    what += [f"{name} was made anew, without the records that were in it." for name in sorted(made_anew)]
    with closing(bus.look(_RECORDS)) as reader:
        bounds = reader.bounds()
    damage = _Damage(what, set(state.assembly.open) if made_anew else set(), set())
    if TRAJECTORIES.name in made_anew:
        damage.unread.update(partition for name, partition in bounds if name == TRAJECTORIES.name)
    else:
        _compare_trajectories(state.assembly, bounds, damage)
    if REWARDS.name not in made_anew:
        _compare_rewards(state.assembly, bounds, damage)
    if damage.unread:
        damage.lost |= _never_read(bus, state, damage.unread, bounds)
    return LogChange(
        what=tuple(damage.what),
        lost=tuple(sorted(damage.lost)),
        state=replace(state, identities=dict(identities), assembly=_moved(state.assembly, bounds, made_anew)),
    )


def ranges(seqs: Iterable[int]) -> str:
    """Ascending numbers as text, such as `3, 5-9`."""
    found: list[list[int]] = []
    for seq in seqs:
        if found and seq == found[-1][1] + 1:
            found[-1][1] = seq
        else:
            found.append([seq, seq])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _made_anew(state: LearnerState, identities: Mapping[str, str]) -> set[str]:
    missing = sorted(set(state.identities) - set(identities))
    if missing:
        raise UserError(
            f"The checkpoint {state.id} goes on from topics that are not there: {', '.join(missing)}.",
            hint="Point [kafka] to where the run was. If they were deleted, `echoswarm topics apply` makes them anew, and a start then "
            "says what was lost with them.",
        )
    different = {name for name, value in identities.items() if _id(state.identities.get(name, value)) != _id(value)}
    pointers = [name for name in _POINTERS if name in different]
    if pointers:
        raise UserError(
            f"The checkpoint {state.id} belongs to another log: {', '.join(pointers)} {'is' if len(pointers) == 1 else 'are'} not the one "
            "that it knows, so the public steps of the run cannot be known.",
            hint=f"Point [kafka] to the cluster and namespace it came from. If they are gone for good: {fork_hint(state)}",
        )
    if _count(identities[TRAJECTORIES.name]) != _count(identities[REWARDS.name]):
        raise UserError(
            f"trajectories has {_count(identities[TRAJECTORIES.name])} partitions and rewards {_count(identities[REWARDS.name])}: a reward "
            "stands in the partition of the trajectory that it judges, so both must have as many.",
            hint="Let the smaller one grow: `echoswarm topics apply --force`.",
        )
    return different


def fork_hint(state: LearnerState) -> str:
    """The command that forks the run from the newest snapshot that the checkpoint `state` knows."""
    version = state.version if state.snapshot is not None else state.published or 0
    return f"`echoswarm fork {state.run_id}-2 --version {version}` begins another run from version {version}."


def _compare_trajectories(assembly: AssemblyState, bounds: _Bounds, damage: _Damage) -> None:
    for partition, read_to in sorted(assembly.trajectory_read_to.items()):
        low, end = bounds[TRAJECTORIES.name, partition]
        opened = {seq: where.offset for seq, lows in assembly.open.items() for where in lows if where.partition == partition}
        if read_to > end:
            damage.what.append(f"trajectories[{partition}] ends at offset {end}, and was read to {read_to}: its end was cut off.")
            damage.lost |= set(opened)
            continue
        lost = {seq for seq, offset in opened.items() if offset < low}
        if lost or read_to < low:
            needed = min([read_to, *(opened[seq] for seq in lost)])
            damage.what.append(f"trajectories[{partition}] begins at offset {low}; {needed} to {low - 1} were still needed.")
            damage.lost |= lost
        if read_to < low:
            damage.unread.add(partition)


def _compare_rewards(assembly: AssemblyState, bounds: _Bounds, damage: _Damage) -> None:
    for partition, position in sorted(assembly.reward_lows.items()):
        low, end = bounds[REWARDS.name, partition]
        opened = {seq for seq, lows in assembly.open.items() if any(where.partition == partition for where in lows)}
        if position > end:
            damage.what.append(f"rewards[{partition}] ends at offset {end}, and was read to {position} at least: its end was cut off.")
            damage.lost |= opened
        elif position < low:
            damage.what.append(f"rewards[{partition}] begins at offset {low}; {position} to {low - 1} were still needed.")
            damage.lost |= opened


def _never_read(bus: Bus, state: LearnerState, partitions: Collection[int], bounds: _Bounds) -> set[int]:
    """Seqs that workers have answered in `partitions`, that are not closed, and of which no record is left."""
    closed = ClosedSeqs(state.assembly.floor, state.assembly.closed)
    with closing(bus.look([TRAJECTORIES])) as reader:
        # Seqs of records before `read_to` are closed, or open in the checkpoint.
        read_to = {(TRAJECTORIES.name, partition): offset for partition, offset in state.assembly.trajectory_read_to.items()}
        written = {place: found for place, found in bounds.items() if place[0] == TRAJECTORIES.name}
        reader.start({place: min(end, max(low, read_to.get(place, 0))) for place, (low, end) in written.items()})
        ends = {place: end for place, (_, end) in written.items()}
        left = {
            message.record.seq
            for messages in reader.read_to_end(Deadline.after(READ_S, bus.clock), ends)
            for message in messages
            if isinstance(message.record, Trajectory) and message.record.purpose is Purpose.TRAIN
        }
    return {
        request.seq
        for request in _finished_requests(bus, closed.floor)
        if request.seq not in closed
        and request.seq not in left
        and request.seq not in state.assembly.open
        and partition_of(request.group_id, len(written)) in partitions
    }


def _finished_requests(bus: Bus, floor: int) -> list[IssuedRequest]:
    """Training requests from the seq `floor` on that the workers have committed, after all their trajectories were acknowledged."""
    with closing(bus.observer()) as observer, closing(bus.look([REQUESTS])) as reader:
        committed = observer.committed(observer.num_partitions())
        patience = Deadline.after(READ_S, bus.clock)
        issued = read_issued(reader, floor=floor, committed=committed, since_ms=None, patience=patience)
    return [
        request
        for request in issued
        if request.purpose is Purpose.TRAIN and request.seq >= floor and request.offset < committed.get(request.partition, 0)
    ]


def _moved(assembly: AssemblyState, bounds: _Bounds, made_anew: Collection[str]) -> AssemblyState:
    """The same closed seqs, and positions within the log's bounds. A topic that was made anew is read from its beginning."""

    def within(topic: Topic, positions: Mapping[int, int]) -> dict[int, int]:
        if topic.name in made_anew:
            return {}
        found = {partition: (position, bounds[topic.name, partition]) for partition, position in positions.items()}
        return {partition: min(max(position, low), end) for partition, (position, (low, end)) in found.items()}

    lows = within(TRAJECTORIES, assembly.trajectory_lows)
    return replace(
        assembly,
        trajectory_lows=lows,
        trajectory_read_to=within(TRAJECTORIES, assembly.trajectory_read_to),
        reward_lows=within(REWARDS, assembly.reward_lows),
        settled=frozenset(
            where
            for where in assembly.settled
            if where.partition in lows and lows[where.partition] <= where.offset < bounds[TRAJECTORIES.name, where.partition][1]
        ),
        open={},
    )


def _id(identity: str) -> str:
    return identity.rpartition("/")[0] or identity


def _count(identity: str) -> int:
    return int(identity.rpartition("/")[2])
