"""Lines about what stands still in a run: the roles' own notices, and problems that show only in all roles together.

A place that has not moved for twenty seconds gets a line at once, and then one per minute. Pure; the caller owns clock and screen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from echo_ops.report.pool import WorkerLine
from echo_ops.report.run_view import RunView
from echo_runtime.notices import STANDSTILL_S
from echo_schemas.records import WorkerState

_SAY_EVERY_S = 60.0


@dataclass(slots=True)
class _Mark:
    """A place's number, which grows while the place moves, and the time of its last change."""

    value: int
    moved_s: float


class Standstills:
    """Remembers the places' last changes and the given lines."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        self._said_s: dict[str, float] = {}

    def news(self, view: RunView, now_s: float) -> Iterator[str]:
        """Lines for places that stand still now, without those given within the last minute."""
        found = dict(self._found(view, now_s))
        for place, line in found.items():
            if now_s - self._said_s.get(place, -_SAY_EVERY_S) >= _SAY_EVERY_S:
                self._said_s[place] = now_s
                yield line

    def _found(self, view: RunView, now_s: float) -> Iterator[tuple[str, str]]:
        """(place, line). A place stands still only while there is work for it."""
        for process, notices in view.notices.items():
            for place, sentence in notices.items():
                yield f"{process} {place}", f"{process}: {sentence}"
        # A run that goes on has its earlier life's requests and progress, and starting takes its time.
        is_starting = view.progress is not None and view.progress.time_ms < view.started_ms
        if view.progress is not None and not is_starting:
            still_s = self._still_s("learner", view.progress.time_ms, now_s)
            if still_s is not None:
                yield (
                    "learner",
                    f"The learner has not been heard of for {still_s:.0f} s. Look at its log: does its process run, and Kafka answer?",
                )
        # They say themselves for how long their engine has been starting.
        have_started = {line.state for line in _alive(view)} != {WorkerState.STARTING}
        requests, unscored = view.lags.get("requests open", 0), view.lags.get("not yet scored", 0)
        still_s = self._still_s(
            "trajectories", view.trajectories_published, now_s, has_work=requests > 0 and have_started and not is_starting
        )
        if still_s is not None:
            yield "trajectories", f"No trajectory has come for {still_s:.0f} s, and {requests:,} requests are open. {_workers(view)}"
        still_s = self._still_s("rewards", view.rewards_written, now_s, has_work=unscored > 0)
        if still_s is not None:
            yield (
                "rewards",
                (
                    f"No reward has come for {still_s:.0f} s, and {unscored:,} trajectories are not yet scored. Look at the rewards' logs; "
                    "an application of another name that has ended counts too."
                ),
            )
        yield from self._weights(view, now_s, have_started=have_started)

    def _weights(self, view: RunView, now_s: float, *, have_started: bool) -> Iterator[tuple[str, str]]:
        """Workers that do not install the published weights."""
        published = -1 if view.progress is None else view.progress.published
        lines = _alive(view)
        installed = [line.version for line in lines if line.version is not None]
        behind = [line for line in lines if line.version is None or line.version < published]
        has_work = have_started and published >= 0 and len(behind) == len(lines) > 0
        still_s = self._still_s("weights", sum(installed) + len(installed), now_s, has_work=has_work)
        if still_s is not None:
            versions = ", ".join(f"{line.worker_id} has {'none' if line.version is None else f'v{line.version}'}" for line in behind[:3])
            yield (
                "weights",
                (
                    f"No worker has installed weights for {still_s:.0f} s, and version {published} is published: {versions}. "
                    "Look at the workers' logs: can they read the weights, and do generations under way end?"
                ),
            )

    def _still_s(self, place: str, value: int, now_s: float, *, has_work: bool = True) -> float | None:
        """Seconds since the place last moved, if they are too many."""
        mark = self._marks.get(place)
        if mark is None or mark.value != value or not has_work:
            self._marks[place] = _Mark(value, now_s)
            return None
        still_s = now_s - mark.moved_s
        return still_s if still_s >= STANDSTILL_S else None


def _alive(view: RunView) -> list[WorkerLine]:
    return [line for line in view.pool.lines(recent=True) if line.state is not WorkerState.GONE]


def _workers(view: RunView) -> str:
    """The workers' state, and what to check."""
    alive = _alive(view)
    if not alive:
        return "No worker is there: look at the workers' logs, or start one (`echoswarm run worker`)."
    in_hand, is_one = sum(line.in_flight for line in alive), len(alive) == 1
    if in_hand:
        they = "1 worker has" if is_one else f"{len(alive)} workers have"
        return f"{they} {in_hand:,} in hand: long generations, or an engine that hangs; look at the workers' logs."
    states = ", ".join(sorted({line.state.value for line in alive}))
    they, have = ("1 worker is", "has") if is_one else (f"{len(alive)} workers are", "have")
    return f"{they} {states} and {have} nothing in hand: look at their logs, and at their versions."
