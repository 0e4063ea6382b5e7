"""When the learner reached each version: splits a sample's staleness by where it arose.

oldest version ──dispatch──▶ version at start ──in flight──▶ version at finish ──in queue──▶ version of the batch
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from echo_core.staleness import age_of
from echo_learner.step_metrics import StalenessStages
from echo_schemas.records import Trajectory

# Far more versions than any sample is behind; an older version counts as the oldest one kept.
_KEPT = 1024


class VersionHistory:
    """When each version came to be, on this process's wall clock. One thread uses it."""

    def __init__(self, version: int, time_ms: int) -> None:
        self._times: deque[int] = deque([time_ms], maxlen=_KEPT)
        self._versions: deque[int] = deque([version], maxlen=_KEPT)

    def reached(self, version: int, time_ms: int) -> None:
        """The learner is at `version` from `time_ms` on. A wall clock that went back counts as one that stood still."""
        self._versions.append(version)
        self._times.append(max(time_ms, self._times[-1]))

    def stages(self, trajectories: Sequence[Trajectory], version: int) -> StalenessStages:
        """The four staleness numbers of each sample of a batch formed at `version`.

        Workers' clocks may differ from this one; an impossible time counts as the nearest possible one, so the first three are never
        negative and always add up to the fourth.
        """
        oldest = np.array([version - age_of(trajectory, version) for trajectory in trajectories], np.int64)
        started = self._versions_at([trajectory.started_ms for trajectory in trajectories])
        finished = self._versions_at([trajectory.finished_ms for trajectory in trajectories])
        started = np.clip(started, oldest, version)
        finished = np.clip(finished, started, version)
        return StalenessStages(
            dispatch=(started - oldest).tolist(),
            in_flight=(finished - started).tolist(),
            in_queue=(version - finished).tolist(),
            total=(version - oldest).tolist(),
        )

    def _versions_at(self, times_ms: Sequence[int]) -> npt.NDArray[np.int64]:
        index = np.searchsorted(np.array(self._times, np.int64), np.array(times_ms, np.int64), side="right") - 1
        versions: npt.NDArray[np.int64] = np.array(self._versions, np.int64)[np.maximum(index, 0)]
        return versions
