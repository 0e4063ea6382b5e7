"""Which requests a worker has in hand, noted beside the group's committed offsets, so that the next owner of a partition knows them.

    taken ──begin──▶ noted with the next commit ──▶ ended: removed             worker dead: the next owner reads the note, and each request
                                                                               in it has seen one death more

The note belongs to the partition and not to the worker, so the count survives the worker, its disk and its machine. A worker that leaves or
hands a partition over alive removes its entries. A commit takes a moment, within which a request might kill its worker. So a request that
may have been delivered before (it was in the log when the partition came) is not generated before its note is in the group. Other requests
do not wait: when they are delivered again after a death they are such requests.

Threads: the poll thread of the consumer loop reads and writes notes; any thread calls the rest; nothing blocks.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from echo_bus.group.notes import MAX_NOTE_LENGTH
from echo_rollout.journal import CrashJournal
from echo_schemas.records import Coordinates

logger = logging.getLogger(__name__)

# Longest wait for a note; then the request is begun without one.
_PATIENCE_S = 5.0


@dataclass(slots=True)
class _Partition:
    """`deaths`: of requests that are not done, by offset. `begun`: in hand here; `noted`: those that the group knows. `end`: requests below
    it may have been in hand at another worker."""

    deaths: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    noted: frozenset[int] = frozenset()
    end: int = 0


class InHandNotes:
    """The notes of one process on `requests`; see `echo_bus.group.notes.Notes`."""

    def __init__(self, *, session: str) -> None:
        """`session` names this process: an entry of its own, which it reads after a partition came back, is no death."""
        self._session = session
        self._lock = threading.Lock()
        self._partitions: defaultdict[int, _Partition] = defaultdict(_Partition)
        self._waiting: dict[tuple[int, int], Callable[[], None]] = {}
        self._stopped = False
        self.blames = False
        """Whether a request in hand may be why this process ends: then the entries stay as the partitions are handed over."""
        self.changed: Callable[[], None] = lambda: None
        """Called when a note should be written soon."""

    # The poll thread

    def found(self, partition: int, note: str, end: int) -> None:
        """Take over the note of the last owner."""
        session, in_hand, deaths = _parsed(note)
        if session != self._session:
            for offset in in_hand:
                deaths[offset] = deaths.get(offset, 0) + 1
        with self._lock:
            state = self._partitions[partition]
            state.noted = frozenset()
            state.deaths, state.end = deaths, end
        if deaths:
            logger.warning("Requests at the offsets %s of partition %d were in hand at the death of a worker", sorted(deaths), partition)

    def write(self, partition: int, offset: int, *, leaving: bool) -> str:
        """The note: requests in hand from `offset` on, and the deaths of such requests."""
        with self._lock:
            state = self._partitions[partition]
            in_hand = [] if leaving and not self.blames else sorted(each for each in state.begun if each >= offset)
            state.deaths = {each: count for each, count in state.deaths.items() if each >= offset}
            deaths = dict(sorted(state.deaths.items()))
        while (note := _written(self._session, in_hand, deaths)) and len(note) > MAX_NOTE_LENGTH:
            # Over the limit, forget the newest offsets first: a request that killed before is among the older ones.
            del in_hand[len(in_hand) // 2 :]
            deaths = dict(list(deaths.items())[: len(in_hand)])
        return note

    def written(self, partition: int, note: str) -> None:
        """Let the requests begin that waited for this note."""
        _, in_hand, _ = _parsed(note)
        with self._lock:
            self._partitions[partition].noted = frozenset(in_hand)
            calls = [call for offset in in_hand if (call := self._waiting.pop((partition, offset), None)) is not None]
        for call in calls:
            call()

    # The worker

    def deaths(self, where: Coordinates) -> int:
        """Deaths of any worker that had the request in hand."""
        return self._partitions[where.partition].deaths.get(where.offset, 0)

    def begin(self, where: Coordinates) -> None:
        """The request is in hand."""
        with self._lock:
            self._partitions[where.partition].begun.add(where.offset)
        self.changed()

    def end(self, where: Coordinates) -> None:
        """The request is done, closed or handed back: no worker died of it."""
        with self._lock:
            state = self._partitions[where.partition]
            state.begun.discard(where.offset)
            state.deaths.pop(where.offset, None)

    async def noted(self, where: Coordinates) -> bool:
        """Wait for the note of a request that may have been in hand before. False if no request is to begin any more."""
        if where.offset >= self._partitions[where.partition].end:
            return True
        loop, event, place = asyncio.get_running_loop(), asyncio.Event(), (where.partition, where.offset)

        def wake() -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

        with self._lock:
            if self._stopped or where.offset in self._partitions[where.partition].noted:
                return not self._stopped
            self._waiting[place] = wake
        self.changed()
        try:
            await asyncio.wait_for(event.wait(), _PATIENCE_S)
        except TimeoutError:
            logger.warning("The request at %d[%d] is begun without a note: the group does not take one", *place)
        finally:
            with self._lock:
                self._waiting.pop(place, None)
        return not self._stopped

    def stop(self) -> None:
        """Let no waiting request begin: notes are not written any more."""
        with self._lock:
            self._stopped = True
            calls = list(self._waiting.values())
        for call in calls:
            call()

    def resume(self) -> None:
        """Notes are written again: the worker was on standby and takes requests."""
        with self._lock:
            self._stopped = False


class DeathRecord:
    """`Deaths` by the group's notes and by the journal on this worker's disk, which is written at once but lost with the machine."""

    def __init__(self, journal: CrashJournal, notes: InHandNotes) -> None:
        self._journal = journal
        self._notes = notes

    def deaths(self, where: Coordinates) -> int:
        return max(self._journal.deaths(where), self._notes.deaths(where))

    def begin(self, where: Coordinates) -> None:
        self._journal.begin(where)
        self._notes.begin(where)

    def end(self, where: Coordinates) -> None:
        self._journal.end(where)
        self._notes.end(where)


def _written(session: str, in_hand: list[int], deaths: dict[int, int]) -> str:
    if not in_hand and not deaths:
        return ""
    return json.dumps({"by": session, "in_hand": in_hand, "deaths": {str(offset): count for offset, count in deaths.items()}})


def _parsed(note: str) -> tuple[str, list[int], dict[int, int]]:
    """Session, offsets in hand, deaths by offset. A note of another form (another release's, an operator's tool's) counts as empty."""
    if not note:
        return "", [], {}
    try:
        content = json.loads(note)
        in_hand = [int(offset) for offset in content["in_hand"]]
        return str(content["by"]), in_hand, {int(offset): int(count) for offset, count in content["deaths"].items()}
    except Exception as exc:  # any client of the group may have written it
        logger.warning("A note beside the committed offsets is passed over: %r is not ours (%s)", note[:100], exc)
        return "", [], {}
