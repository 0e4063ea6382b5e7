"""The origin of a version's weights, and the fates of the samples that it generated: counted from the history."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from echo_replay.history import History, HistoryRecord
from echo_replay.near import read_near
from echo_replay.ranges import published
from echo_replay.selection import Fate, Selection, Steps, Versions
from echo_replay.steps import Step
from echo_schemas.errors import UserError
from echo_schemas.records import StepReport, WeightManifest


@dataclass(slots=True, kw_only=True)
class Moments:
    """Count, mean, standard deviation, least and most of a stream of values (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, value: float) -> None:
        self.count += 1
        distance = value - self.mean
        self.mean += distance / self.count
        self.squares += distance * (value - self.mean)
        self.least, self.most = min(self.least, value), max(self.most, value)

    @property
    def std(self) -> float:
        """The population's standard deviation."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@dataclass(slots=True, kw_only=True)
class GroupMade:
    """A group of a step: its samples, and their rewards and advantages."""

    group_id: str
    num_samples: int = 0
    rewards: dict[str, Moments] = field(default_factory=dict)
    advantages: list[float] = field(default_factory=list)
    versions: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class VersionOrigin:
    """The origin of the weights of `version`. `report` is None for the version that a run begins with, `manifest` for an unpublished one.
    `sampled_by`: its training samples by the oldest version that made a token of each. `became`: by fate, the samples that it generated.
    `num_later_rewards`: records of `rewards` that were written too late to be read."""

    version: int
    report: StepReport | None = None
    manifest: WeightManifest | None = None
    groups: dict[str, GroupMade] = field(default_factory=dict)
    workers: Counter[str] = field(default_factory=Counter)
    sampled_by: Counter[int] = field(default_factory=Counter)
    rewards: dict[str, Moments] = field(default_factory=dict)
    became: Counter[str] = field(default_factory=Counter)
    num_later_rewards: int = 0
    missing: list[str] = field(default_factory=list)

    def to_plain(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "checkpoint": None if self.report is None else self.report.checkpoint,
            "parent": None if self.report is None else self.report.parent,
            "session": None if self.report is None else self.report.session,
            "sha256": None if self.manifest is None else self.manifest.sha256,
            "groups": [group.group_id for group in self.groups.values()],
            "workers": dict(self.workers),
            "sampled_by": dict(sorted(self.sampled_by.items())),
            "rewards": {name: asdict(moments) | {"std": moments.std} for name, moments in self.rewards.items()},
            "became": dict(self.became),
            "missing": self.missing,
        }


def made_and_published(history: History, version: int) -> tuple[dict[int, Step], dict[int, WeightManifest]]:
    """The run's steps and its published manifests, by version. Raises UserError if `version` is in neither."""
    steps = {step.version: step for step in list(history.log.steps)}
    manifests = {manifest.version: manifest for _, is_current, manifest in list(history.log.manifests) if not is_current}
    if version not in steps and version not in manifests:
        known = sorted({*steps, *manifests})
        hint = f"{history.run_id} has {known[0]} to {known[-1]}." if known else f"{history.run_id} has published none yet."
        raise UserError(f"There is no version {version} of {history.run_id}.", hint=hint)
    return steps, manifests


def origin_of(history: History, version: int, *, with_samples: bool = True, late: bool = False) -> VersionOrigin:
    """The origin of one version. `with_samples`: count also the fates of its samples, which reads the log from its publication on. `late`:
    see `read_near`. Raises UserError for a version that is neither published nor trained."""
    steps, manifests = made_and_published(history, version)
    step = steps.get(version)
    origin = VersionOrigin(version=version, report=None if step is None else step.report, manifest=manifests.get(version))
    if step is not None:
        _enter(origin, read_near(history, Selection(range=Steps(version, version)), late=late))
        origin.num_later_rewards = history.num_later_rewards
        origin.missing += history.missing
        origin.groups = dict(sorted(origin.groups.items(), key=lambda item: (len(item[0]), item[0])))
    if with_samples and version in published(history.log):
        for record in history.read(Selection(range=Versions(version, version)), rewards=False):
            origin.became[became(record)] += 1
        origin.missing += history.missing
    return origin


def became(record: HistoryRecord) -> str:
    """A record's fate in words: `trained in v121`, `dropped: stale`, `open`."""
    if record.fate is Fate.TRAINED:
        return f"trained in v{record.step}"
    return record.fate.value if record.drop is None else f"dropped: {record.drop.why.value}"


def _enter(origin: VersionOrigin, samples: Iterable[HistoryRecord]) -> None:
    for record in samples:
        trajectory = record.trajectory
        if trajectory is None:
            continue
        group = origin.groups.setdefault(trajectory.group_id, GroupMade(group_id=trajectory.group_id))
        group.num_samples += 1
        group.versions.update(span.version for span in trajectory.version_spans)
        if record.entry.advantage is not None:
            group.advantages.append(record.entry.advantage)
        for name, value in record.rewards.items():
            group.rewards.setdefault(name, Moments()).add(value)
            origin.rewards.setdefault(name, Moments()).add(value)
        origin.workers[trajectory.worker_id] += 1
        origin.sampled_by[trajectory.min_version] += 1
