"""Scores trajectories again that the learner names because their rewards are missing.

    learner ─ MissingRewards on `progress` ─▶ view ─▶ of our partitions and committed? ─▶ read by offset ─▶ scored ─▶ `rewards`

Only records below the group's committed offset are read again: the others are still being scored. A second reward for the same record does
no harm, since the first scored one counts.

Threads: `run` belongs to the application's event loop; reading blocks, and runs on a thread of the loop's pool.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from echo_bus.bus import Bus
from echo_bus.clock import Clock, Deadline
from echo_bus.errors import TransportError
from echo_schemas.records import Coordinates, MissingRewards, Trajectory
from echo_schemas.topics import TRAJECTORIES
from echo_streams.processing import Outgoing
from echo_streams.scoring import Judgeable

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 2.0
# Seconds for a reward to reach the learner, and for the learner to name the record no more.
_NOT_AGAIN_FOR_S = 60.0
_REMEMBERED = 4096
_READ_S = 30.0


@dataclass(slots=True, kw_only=True, eq=False)
class SecondLook:
    """Scores named trajectories again. `run` it until it is cancelled.

    `missing()`: the learner's newest list. `committed(partition)`: the group's committed offset, None for a partition of another member.
    `read`: returns the trajectories at some places; blocks. `judge`: returns their rewards, encoded.
    """

    names: frozenset[str]
    missing: Callable[[], MissingRewards | None]
    committed: Callable[[int], int | None]
    read: Callable[[Sequence[Coordinates]], list[Judgeable]]
    judge: Callable[[Sequence[Judgeable]], Awaitable[list[Outgoing]]]
    send: Callable[[list[Outgoing]], Awaitable[object]]
    clock: Clock
    _looked_s: OrderedDict[Coordinates, float] = field(default_factory=OrderedDict, init=False)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                await self.look()
            except TransportError as exc:
                logger.warning("Trajectories without a reward could not be read again: %s", exc)
            except Exception:  # the edge of the task: nobody waits for it, and the learner names the trajectories again
                logger.exception("Trajectories without a reward could not be scored again")

    async def look(self) -> None:
        """Score the named trajectories of our partitions that were not scored again within the last minute. Raises TransportError."""
        wanted = self._wanted(self.missing())
        if not wanted:
            return
        found = await asyncio.to_thread(self.read, wanted)
        await self.send(await self.judge(found))
        logger.info("%d trajectories without a reward were scored again", len(found))

    def _wanted(self, named: MissingRewards | None) -> list[Coordinates]:
        if named is None or not self.names & set(named.rewards):
            return []
        now_s = self.clock.monotonic_s()
        wanted = []
        for where in named.where:
            committed = self.committed(where.partition)
            is_done = committed is not None and where.offset < committed
            if is_done and now_s - self._looked_s.get(where, -_NOT_AGAIN_FOR_S) >= _NOT_AGAIN_FOR_S:
                wanted.append(where)
                self._looked_s[where] = now_s
                self._looked_s.move_to_end(where)
        while len(self._looked_s) > _REMEMBERED:
            self._looked_s.popitem(last=False)
        return wanted


def read_again(bus: Bus, places: Sequence[Coordinates]) -> list[Judgeable]:
    """The trajectories at `places`, except those that retention has removed. Raises TransportError."""
    wanted: dict[int, set[int]] = defaultdict(set)
    for where in places:
        wanted[where.partition].add(where.offset)
    found: list[Judgeable] = []
    with closing(bus.look([TRAJECTORIES])) as reader:
        bounds = reader.bounds()
        starts, ends = {}, {}
        for place, (low, end) in bounds.items():
            offsets = [offset for offset in wanted.get(place[1], ()) if low <= offset < end]
            starts[place] = min(offsets, default=end)
            ends[place] = max(offsets, default=end - 1) + 1
        reader.start(starts)
        for messages in reader.read_to_end(Deadline.after(_READ_S, bus.clock), ends):
            found += [
                Judgeable(trajectory=message.record, at=message.coordinates)
                for message in messages
                if isinstance(message.record, Trajectory) and message.coordinates.offset in wanted[message.coordinates.partition]
            ]
    return found
