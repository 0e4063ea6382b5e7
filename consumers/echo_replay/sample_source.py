"""The trajectories that some steps were trained on, step after step, fetched from the log in one pass.

Training order follows the order of the log closely, so one reader goes forward and keeps what later steps will want; everything else is let
go. One thread uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType

import numpy as np

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded
from echo_bus.reading.reader import From
from echo_schemas.columns import OFFSET_DTYPE, TOKEN_DTYPE
from echo_schemas.errors import UserError
from echo_schemas.records import Batch, Trajectory
from echo_schemas.topics import TRAJECTORIES

_READ_S = 600.0
_AT_ONCE = 500

Place = tuple[int, int]
"""(partition, offset)."""


class SampleSource:
    """A context manager: its client is closed at the end."""

    def __init__(self, bus: Bus, batches: Mapping[int, Batch]) -> None:
        """`batches` by the version that they made, all that will be asked for. Raises UserError for samples that retention has removed."""
        self._clock = bus.clock
        self._wanted: set[Place] = set()
        self._kept: dict[Place, Trajectory] = {}
        lows: dict[int, int] = {}
        for batch in batches.values():
            for partition, offset in places_of(batch):
                self._wanted.add((partition, offset))
                lows[partition] = min(offset, lows.get(partition, offset))
        self._reader = bus.reader([TRAJECTORIES])
        try:
            self._ends = self._reader.start()
            self._refuse_removed(batches)
            known = {partition for _, partition in self._ends}
            if strange := sorted(lows.keys() - known):
                raise UserError(
                    f"The steps name partition {strange[0]} of trajectories, which is not there.", hint="`echoswarm audit` says more."
                )
            self._reader.start({(TRAJECTORIES.name, partition): low for partition, low in lows.items()}, otherwise=From.END)
        except BaseException:  # whatever ends the start: the client must not outlive it
            self._reader.close()
            raise

    def __enter__(self) -> SampleSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._reader.close()

    def take(self, version: int, batch: Batch) -> Sequence[Trajectory]:
        """The samples of the step that made `version`, in the batch's order. Each may be taken once.

        Raises UserError if one is not in the log or is not what the batch says; DeadlineExceeded, TransportError.
        """
        places = places_of(batch)
        self._read_until(version, places)
        found = [self._kept.pop(place) for place in places]
        seqs, indices = np.frombuffer(batch.seqs, OFFSET_DTYPE).tolist(), np.frombuffer(batch.indices, TOKEN_DTYPE).tolist()
        for place, trajectory, seq, index in zip(places, found, seqs, indices, strict=True):
            if (trajectory.seq, trajectory.index) != (seq, index):
                raise UserError(
                    f"At partition {place[0]}, offset {place[1]} lies {trajectory.name}; version {version} was trained on seq {seq}, "
                    f"sample {index}.",
                    hint="It is not the log that the run was trained on: `echoswarm audit` says more.",
                )
        return found

    def _read_until(self, version: int, places: Sequence[Place]) -> None:
        deadline = Deadline.after(_READ_S, self._clock)
        while missing := [place for place in places if place not in self._kept]:
            passed = [place for place in missing if self._reader.positions[TRAJECTORIES.name, place[0]] > place[1]]
            beyond = [place for place in missing if place[1] >= self._ends[TRAJECTORIES.name, place[0]]]
            if passed or beyond:
                partition, offset = (passed or beyond)[0]
                raise UserError(
                    f"Version {version} was trained on partition {partition}, offset {offset}, where the log has no record of this run.",
                    hint="`echoswarm audit` says more.",
                )
            if deadline.expired():
                raise DeadlineExceeded(f"The samples of version {version} were not read in {_READ_S:g} s.")
            for message in self._reader.read(_AT_ONCE):
                place = (message.partition, message.offset)
                if place in self._wanted and isinstance(message.record, Trajectory):
                    self._wanted.discard(place)
                    self._kept[place] = message.record

    def _refuse_removed(self, batches: Mapping[int, Batch]) -> None:
        lows = self._reader.positions
        for version, batch in sorted(batches.items()):
            removed = sum(offset < lows.get((TRAJECTORIES.name, partition), 0) for partition, offset in places_of(batch))
            if removed:
                raise UserError(
                    f"Retention has removed {removed} of the {batch.num_samples} samples that version {version} was trained on.",
                    hint="Start from a checkpoint at or above this version, with a later first --version.",
                )


def places_of(batch: Batch) -> list[Place]:
    """Where each sample lies, in the batch's order."""
    return list(
        zip(np.frombuffer(batch.partitions, TOKEN_DTYPE).tolist(), np.frombuffer(batch.offsets, OFFSET_DTYPE).tolist(), strict=True)
    )
