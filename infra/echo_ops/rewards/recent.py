"""The newest rewards and trajectories of a run. Everything blocks the caller and raises TransportError."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.message import Message
from echo_schemas.records import Purpose, Reward, Trajectory
from echo_schemas.topics import REWARDS, TRAJECTORIES, Topic
from echo_streams.scoring import Judgeable

_READ_S = 60.0
# Records of each partition that are read besides those asked for: after its last step a run answers the prompts of its evaluations.
_LOOK_BACK = (0, 500, 10_000)


def newest_rewards(bus: Bus, last: int, until_ms: int | None = None) -> list[Reward]:
    """The run's rewards among the newest `last` records of each partition of `rewards`, by time: the same list however the broker mixes
    the partitions. `until_ms`: the newest before that time, for a run with later runs in the same topic.
    """
    found = [message.record for message in _newest(bus, REWARDS, last, until_ms) if isinstance(message.record, Reward)]
    return sorted(found, key=lambda reward: (reward.time_ms, reward.of.partition, reward.of.offset, reward.name))


def recent_trajectories(bus: Bus, count: int) -> list[Judgeable]:
    """The newest `count` trajectories of training, oldest first; fewer if evaluations or other runs hold nearly all newest records."""
    found: list[tuple[int, Judgeable]] = []
    for more in _LOOK_BACK:
        found = [
            (message.timestamp_ms, Judgeable(trajectory=message.record, at=message.coordinates))
            for message in _newest(bus, TRAJECTORIES, count + more)
            if isinstance(message.record, Trajectory) and message.record.purpose is Purpose.TRAIN
        ]
        if len(found) >= count:
            break
    found.sort(key=lambda each: each[0])
    return [item for _, item in found[-count:]]


def _newest(bus: Bus, topic: Topic, last: int, until_ms: int | None = None) -> Iterator[Message]:
    with closing(bus.look([topic])) as reader:
        bounds = reader.bounds()
        ends = {place: high for place, (_, high) in bounds.items()} if until_ms is None else reader.offsets_at(until_ms)
        reader.start({place: max(low, ends[place] - last) for place, (low, _) in bounds.items()})
        for messages in reader.read_to_end(Deadline.after(_READ_S, bus.clock), ends):
            yield from (message for message in messages if message.offset < ends[message.topic.name, message.partition])
