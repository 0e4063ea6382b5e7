"""The model of a run behind the screen, the lines and the report, fed by records, readings of the processes' counters and milestones. Pure.

Not thread-safe. Times are seconds since the command was given; `started_ms` converts the records' milliseconds since the epoch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise, zip_longest
from statistics import fmean

from echo_core.bottleneck import Bottleneck, Place, PlaceUse, between, find_bottleneck
from echo_core.capacity.costs import Bill
from echo_ops.report.evaluations import EvaluationView
from echo_ops.report.pool import PoolView
from echo_ops.rewards.watch import ScorerLine
from echo_schemas.records import Control, Drop, Eval, Progress, Record, RewardTerm, SessionClaim, StepReport, WeightManifest, WorkerStatus

TOTAL_REWARD = "total"
EXACT_REWARD = "exact"
MEAN_OVER = 10
"""Steps in the moving mean of the reward."""
_WINDOW_S = 15.0
# Readings for the timeline: of all workers together, and at least of each.
_MOST_READINGS, _LEAST_READINGS = 40_000, 16
# Versions for which the time of each worker's installation is kept.
_KEPT_INSTALLS = 200
_KEPT_DECISIONS = 1000


class Milestone(StrEnum):
    """The events until a run trains, in the usual order. The value is the text to show, with the version in place of {}."""

    KAFKA = "Kafka answers"
    TOPICS = "topics are there"
    LEARNER_IMPORTED = "learner imported"
    LEARNER_READY = "learner ready"
    PUBLISHED = "version {} published"
    WORKER_IMPORTED = "worker imported"
    INSTALLED = "version {} installed"
    TRAJECTORY = "first trajectory"
    STEP = "first step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step as it is shown. `reward` is the mean exact match, or the mean total reward where there is no `exact`."""

    number: int
    time_s: float
    reward: float
    samples: int
    staleness: tuple[int, ...]
    idle_s: float
    training_s: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """One published version: when its manifest was made, and when each worker had it installed."""

    version: int
    created_s: float
    num_bytes: int
    installed_s: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One decision of the coordinator: the activated and released workers, the reason, and the numbers behind it."""

    epoch: int
    time_s: float
    reason: str
    figures: Mapping[str, float]
    activated: list[str]
    released: list[str]

    def in_words(self) -> str:
        """The reason; without one (an operator's order) the order itself."""
        if self.reason:
            return self.reason
        return "; ".join(f"{what} {', '.join(who)}" for what, who in (("activate", self.activated), ("release", self.released)) if who)


@dataclass(slots=True)
class _Window:
    """Readings of the place counters of the last seconds, oldest first."""

    readings: deque[tuple[float, dict[Place, PlaceUse]]] = field(default_factory=deque)

    def add(self, time_s: float, places: dict[Place, PlaceUse]) -> None:
        self.readings.append((time_s, places))
        while len(self.readings) > 2 and self.readings[1][0] <= time_s - _WINDOW_S:
            self.readings.popleft()

    def use(self) -> dict[Place, PlaceUse]:
        return between(self.readings[0][1], self.readings[-1][1]) if len(self.readings) > 1 else {}


class RunView:
    """The model. Call `apply` in the order of the log."""

    def __init__(self, run_id: str, *, started_ms: int, steps_wanted: int, budget: int) -> None:
        self.run_id = run_id
        self.steps_wanted = steps_wanted
        self.budget = budget
        self.steps: list[Step] = []
        self.milestones: dict[Milestone, float] = {}
        self.pool = PoolView()
        self.evaluations = EvaluationView()
        self.bill = Bill()
        """The cost of the steps."""
        self.decisions: list[Decision] = []
        """The coordinator's decisions, oldest first; only the newest of a long run."""
        self.released: set[str] = set()
        """Workers that the coordinator has released since the command and not activated again."""
        self.progress: Progress | None = None
        self.drops: Counter[str] = Counter()
        self.disbelieved: Counter[str] = Counter()
        self.lags: dict[str, int] = {}
        self.trajectories_published = 0
        self.rewards_written = 0
        self.notices: dict[str, Mapping[str, str]] = {}
        """Each process's notices, by place."""
        self.started_ms = started_ms
        self.weights: dict[str, float] | None = None
        """The rewards of the newest step, with their weights."""
        self.terms: tuple[RewardTerm, ...] = ()
        """The same, with the policy for missing rewards."""
        self.scorers: list[ScorerLine] = []
        """The applications that give rewards; empty if no application was attached."""
        self._first: dict[Milestone, int] = {}
        self._created: dict[int, tuple[float, int]] = {}
        self._installed: dict[int, dict[str, float]] = {}
        self._places: dict[str, dict[Place, PlaceUse]] = {}
        self._baseline: dict[Place, PlaceUse] | None = None
        self._window = _Window()
        self._busy: dict[str, list[tuple[float, float]]] = {}

    # What comes in

    def apply(self, record: Record) -> None:
        """Apply one record. Ignores other kinds of records, and records from before the command except the learner's progress."""
        match record:
            case StepReport() | Drop() | Eval() | WorkerStatus() | SessionClaim() | Control() if record.time_ms < self.started_ms:
                pass
            case WeightManifest() if record.created_ms < self.started_ms:
                pass
            case StepReport():
                self._step(record)
            case Drop():
                self.drops[record.why.value] += 1
                if record.worker_id is not None:
                    self.disbelieved[record.worker_id] += 1
            case Eval():
                self.evaluations.add(record)
            case Progress():
                self.progress = record
            case WorkerStatus():
                self._worker(record)
            case WeightManifest():
                self._published(record)
            case Control():
                self._decided(record)
            case SessionClaim():
                self.note(Milestone.LEARNER_READY, self._seconds(record.time_ms))
            case _:
                pass

    def note(self, milestone: Milestone, time_s: float) -> None:
        """Note the time of a milestone; the first time counts."""
        self.milestones.setdefault(milestone, time_s)

    def words_of(self, milestone: Milestone) -> str:
        """The text of a milestone. A resumed run begins with another version than 0."""
        return milestone.value.format(self._first.get(milestone, 0 if self.progress is None else self.progress.version))

    def read_places(self, process: str, places: Mapping[Place, PlaceUse]) -> None:
        """Set the newest reading of one process's counters; it stays when the process ends."""
        self._places[process] = dict(places)

    def close_reading(self, time_s: float) -> None:
        """Call after all processes have been read."""
        total = self.place_totals()
        self._window.add(time_s, total)
        if self.steps and self._baseline is None:
            self._baseline = total

    # What can be asked

    @property
    def num_steps(self) -> int:
        """The newest step's number, also of one before the command."""
        return self.steps[-1].number if self.steps else 0 if self.progress is None else self.progress.version

    @property
    def is_exact(self) -> bool:
        """Whether `reward` is a share of exact matches."""
        return bool(self.steps) and EXACT_REWARD in self.steps[-1].metrics

    def disbelief(self) -> str:
        """A sentence about the workers that served other weights than claimed or requested; empty if none did."""
        found = ", ".join(f"{worker} ({count:,} trajectories dropped)" for worker, count in self.disbelieved.most_common())
        return f"Other weights than claimed, or than asked for, were served by {found}." if found else ""

    def other_rewards(self, wanted: Mapping[str, float]) -> str:
        """A sentence if the run trains on other rewards than the file's, because a run keeps its first ones. Empty before a step."""
        if self.weights is None or self.weights == dict(wanted):
            return ""
        in_force = ", ".join(f"{name} = {weight:g}" for name, weight in self.weights.items()) or "none"
        return (
            f"The file's [rewards] are not in force: this run is trained with {in_force}, its first rewards or those of "
            "`echoswarm reward weight` since. To begin with others, fork it."
        )

    def mean_rewards(self) -> list[float]:
        """For each step, the mean reward of this step and up to nine before it."""
        rewards = [step.reward for step in self.steps]
        return [fmean(rewards[max(0, end - MEAN_OVER) : end]) for end in range(1, len(rewards) + 1)]

    def staleness(self, last: int | None = None) -> tuple[int, ...]:
        """Trained samples by staleness, of the `last` steps or of all."""
        chosen = self.steps if last is None else self.steps[-last:]
        return tuple(map(sum, zip_longest(*(step.staleness for step in chosen), fillvalue=0)))

    def bubble_ratio(self, last: int | None = None) -> float | None:
        """Share of the learner's time without a batch, from the second step on, because the first one waits for the start-up."""
        chosen = self.steps[1:] if last is None else self.steps[1:][-last:]
        idle = sum(step.idle_s for step in chosen)
        total = idle + sum(step.training_s for step in chosen)
        return idle / total if total > 0 else None

    def s_per_step(self, last: int | None = None) -> float | None:
        """Seconds between steps: of the `last` ones, or of all after the first ten (of all, if there are few)."""
        if last is not None:
            chosen = self.steps[-last - 1 :]
        else:
            chosen = self.steps[MEAN_OVER - 1 :] if len(self.steps) >= 2 * MEAN_OVER else self.steps
        return (chosen[-1].time_s - chosen[0].time_s) / (len(chosen) - 1) if len(chosen) > 1 else None

    def samples_per_s(self, last: int = MEAN_OVER) -> float | None:
        """Samples trained per second over the `last` steps."""
        pace = self.s_per_step(last)
        chosen = self.steps[-last:]
        return fmean(step.samples for step in chosen) / pace if pace else None

    def eta_s(self) -> float | None:
        """Seconds until the last step at the present pace; None if there is no end or no pace yet."""
        pace = self.s_per_step(MEAN_OVER)
        return (self.steps_wanted - self.num_steps) * pace if pace is not None and self.steps_wanted else None

    def broadcasts(self) -> list[Broadcast]:
        return [
            Broadcast(version=version, created_s=created, num_bytes=num_bytes, installed_s=dict(self._installed.get(version, {})))
            for version, (created, num_bytes) in sorted(self._created.items())
        ]

    def busy_intervals(self) -> dict[str, list[tuple[float, float, float]]]:
        """For each worker (from, to, share of the time spent generating), between two heartbeats."""
        found: dict[str, list[tuple[float, float, float]]] = {}
        for worker, readings in self._busy.items():
            found[worker] = [
                (start, end, min(1.0, max(0.0, (after - before) / (end - start))))
                for (start, before), (end, after) in pairwise(readings)
                if end > start
            ]
        return found

    def place_totals(self) -> dict[Place, PlaceUse]:
        """The sum over all processes, from their start."""
        total: dict[Place, PlaceUse] = {}
        for places in self._places.values():
            for place, use in places.items():
                total[place] = total.get(place, PlaceUse()) + use
        return total

    def place_use(self, *, recent: bool = False) -> dict[Place, PlaceUse]:
        """From the first step on, or in the last seconds."""
        return self._window.use() if recent else between(self._baseline or {}, self.place_totals())

    def bottleneck(self, *, recent: bool = False) -> Bottleneck:
        return find_bottleneck(self.place_use(recent=recent))

    # Reducers

    def _seconds(self, time_ms: int) -> float:
        return (time_ms - self.started_ms) / 1000

    def _step(self, report: StepReport) -> None:
        samples = sum(report.staleness_total)
        if not samples or (self.steps and report.version <= self.num_steps):
            return
        means = {stats.name: stats.mean for stats in report.reward_stats}
        metrics = dict(report.metrics) | means
        reward = means.get(EXACT_REWARD, means.get(TOTAL_REWARD, metrics.get("reward_mean", 0.0)))
        time_s = self._seconds(report.time_ms)
        self.steps.append(
            Step(
                number=report.version,
                time_s=time_s,
                reward=reward,
                samples=samples,
                staleness=report.staleness_total,
                idle_s=report.idle_s,
                training_s=report.training_s,
                metrics=metrics,
            )
        )
        self.terms = report.reward_terms
        self.weights = {term.name: term.weight for term in report.reward_terms}
        self.pool.train(report.workers)
        self.bill.add(report)
        self.note(Milestone.STEP, time_s)

    def _decided(self, order: Control) -> None:
        """The orders of one transaction have one epoch and form one decision."""
        if order.worker is None or order.worker_id is None:
            return
        if not self.decisions or self.decisions[-1].epoch != order.epoch:
            made = Decision(
                epoch=order.epoch,
                time_s=self._seconds(order.time_ms),
                reason=order.worker.reason,
                figures=dict(order.worker.figures),
                activated=[],
                released=[],
            )
            self.decisions.append(made)
            del self.decisions[:-_KEPT_DECISIONS]
        if order.worker.active:
            self.decisions[-1].activated.append(order.worker_id)
            self.released.discard(order.worker_id)
        else:
            self.decisions[-1].released.append(order.worker_id)
            self.released.add(order.worker_id)

    def _worker(self, status: WorkerStatus) -> None:
        time_s = self._seconds(status.time_ms)
        self.pool.hear(status, time_s)
        readings = self._busy.setdefault(status.worker_id, [])
        readings.append((time_s, status.busy_s))
        if len(readings) > max(_LEAST_READINGS, _MOST_READINGS // len(self._busy)):
            # Without every second reading the intervals are longer, and nothing else is lost: the counter only grows.
            del readings[1:-1:2]
        if status.installed_version is None:
            return
        # If a worker skips versions, only the version that it reports counts.
        if status.installed_version not in self._installed:
            self._installed[status.installed_version] = {}
            self._forget_installs()
        self._installed[status.installed_version].setdefault(status.worker_id, time_s)
        self._first.setdefault(Milestone.INSTALLED, status.installed_version)
        self.note(Milestone.INSTALLED, time_s)

    def _forget_installs(self) -> None:
        """Of old versions keep only the last worker that installed them."""
        if len(self._installed) > _KEPT_INSTALLS:
            *_, passed = sorted(self._installed, reverse=True)[: _KEPT_INSTALLS + 1]
            found = self._installed[passed]
            last = max(found, key=lambda worker: found[worker])
            self._installed[passed] = {last: found[last]}

    def _published(self, manifest: WeightManifest) -> None:
        time_s = self._seconds(manifest.created_ms)
        self._created.setdefault(manifest.version, (time_s, manifest.num_bytes))
        self._first.setdefault(Milestone.PUBLISHED, manifest.version)
        self.note(Milestone.PUBLISHED, time_s)
