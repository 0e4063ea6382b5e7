"""State on compacted topics: the run, its progress, its workers, and the orders to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar

from echo_schemas.records.base import Record, require, require_name, require_not_negative
from echo_schemas.records.step import RewardTerm


class Mode(StrEnum):
    """ECHO's two protocols."""

    ASYNCHRONOUS = "asynchronous"
    SEQUENTIAL = "sequential"


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    STANDBY = "standby"
    DRAINING = "draining"
    GONE = "gone"


class RunState(StrEnum):
    """The state of a run, as its operator orders it."""

    RUNNING = "running"
    PAUSED = "paused"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Record):
    """The description of a run, written once by the process that starts it. `config`: the full configuration as JSON, without secrets."""

    SCHEMA: ClassVar[str] = "run"

    run_id: str
    mode: Mode
    task: str
    model: str
    seed: int
    config: str
    staleness_budget: int
    publication_period: int
    group_size: int
    groups_per_step: int
    parent_run: str | None = None
    parent_version: int | None = None
    parent_sha256: str | None = None
    software: Mapping[str, str] = field(default_factory=dict)
    created_ms: int

    def validate(self) -> None:
        require_not_negative(staleness_budget=self.staleness_budget, parent_version=self.parent_version)
        require(self.publication_period >= 1, "publication_period must be at least 1.")
        require(self.group_size >= 1 and self.groups_per_step >= 1, "group_size and groups_per_step must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Record):
    """The learner's progress. Written at every change and at least once a second, so that a silent learner is recognised.

    `next_seq`: all lower seqs are trained or dropped, and a checkpoint holds that. From `next_seq` on `closed` names the seqs that are
    trained or dropped as of `version`, and `seen` those of which the learner has read a record, or that are closed by now
    (`columns.pack_seqs`). `read_s`: the learner has read all records that the log held for it at this time; `clock_s`: the present time;
    both of the learner's monotonic clock, comparable within a session. None: an older learner wrote the record, or has read nothing yet.
    `held`: the sentence about a client quota that holds the learner back at present."""

    SCHEMA: ClassVar[str] = "progress"

    run_id: str
    session: str
    version: int
    published: int
    groups_trained: int
    groups_dropped: int
    groups_ready: int
    next_seq: int
    closed: bytes | None = None
    seen: bytes | None = None
    clock_s: float | None = None
    read_s: float | None = None
    held: str | None = None
    time_ms: int

    def validate(self) -> None:
        require_not_negative(
            version=self.version,
            published=self.published,
            groups_trained=self.groups_trained,
            groups_dropped=self.groups_dropped,
            groups_ready=self.groups_ready,
            next_seq=self.next_seq,
        )
        require(self.published <= self.version, f"Published {self.published} is ahead of version {self.version}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus(Record):
    """A worker's heartbeat, and its acknowledgement of an installed version (`installed_version` with `weights_sha256`). `kind`: its name
    among [[rollout.pool]]. `partitions`: its partitions of `requests`. `capacity`: groups in hand at most (0: unknown). `rollouts`:
    trajectories acknowledged since it started. `peer_address` (host:port): serves chunks of snapshots to other workers."""

    SCHEMA: ClassVar[str] = "worker_status"

    run_id: str
    worker_id: str
    host: str
    engine: str
    state: WorkerState
    installed_version: int | None = None
    weights_sha256: str | None = None
    rollouts_per_s: float = 0.0
    tokens_per_s: float = 0.0
    busy_s: float = 0.0
    in_flight: int = 0
    price_per_hour: float = 0.0
    capabilities: Mapping[str, str] = field(default_factory=dict)
    kind: str = ""
    partitions: tuple[int, ...] = ()
    capacity: int = 0
    rollouts: int = 0
    peer_address: str = ""
    time_ms: int

    def validate(self) -> None:
        require_not_negative(
            installed_version=self.installed_version,
            rollouts_per_s=self.rollouts_per_s,
            tokens_per_s=self.tokens_per_s,
            busy_s=self.busy_s,
            in_flight=self.in_flight,
            capacity=self.capacity,
            rollouts=self.rollouts,
            price_per_hour=self.price_per_hour,
            partition=min(self.partitions, default=0),
        )
        require_name("worker_id", self.worker_id)
        has_both = (self.installed_version is None) == (self.weights_sha256 is None)
        require(has_both, "An installed version is acknowledged together with its checksum.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerControl:
    """Whether a worker takes part, and the newest sources to fetch weights from (empty: the log). `reason`: a sentence for people.
    `figures`: the numbers of the decision, by name."""

    active: bool
    fetch_from: tuple[str, ...] = ()
    reason: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardControl:
    """The reward specification from `from_version` on."""

    from_version: int
    terms: tuple[RewardTerm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunControl:
    """The operator's order for the whole run."""

    state: RunState


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationOrder:
    """One more evaluation of a kept version. `section`: its [[eval]] section, as JSON."""

    version: int
    name: str
    section: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardAttachment:
    """Whether the reward application of this name scores beside the run's own. `rewards`: the names it gives, for people, never to be
    loaded. `share`: of the groups that it scores."""

    application: str
    is_attached: bool
    rewards: tuple[str, ...] = ()
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Control(Record):
    """An order to a worker, to the learner about rewards or an evaluation, to a reward application, or to the whole run: one of the five.
    Readers ignore lower epochs, and an order of a newer release: read here, such a record has none of the five."""

    SCHEMA: ClassVar[str] = "control"

    run_id: str
    epoch: int
    worker_id: str | None = None
    worker: WorkerControl | None = None
    rewards: RewardControl | None = None
    run: RunControl | None = None
    evaluation: EvaluationOrder | None = None
    attachment: RewardAttachment | None = None
    issued_by: str
    time_ms: int

    def validate(self) -> None:
        require_not_negative(epoch=self.epoch)
        given = sum(part is not None for part in (self.worker, self.rewards, self.run, self.evaluation, self.attachment))
        # No order: one of a newer release, which this one cannot obey.
        require(given <= 1, f"A control record carries one order, this one {given}.")
        require((self.worker is None) == (self.worker_id is None), "A worker order names its worker, the others none.")


def ordered_state(order: Control | None) -> RunState:
    """The state that the newest order for the whole run asks for; RUNNING if there is none."""
    return RunState.RUNNING if order is None or order.run is None else order.run.state
