"""The learner's records: claims of a run, every step in enough detail to train it again, and every evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from echo_schemas.columns import FLAG_DTYPE, LOGPROB_DTYPE, OFFSET_DTYPE, TOKEN_DTYPE, VALUE_DTYPE
from echo_schemas.errors import InvalidReason
from echo_schemas.records.base import Record, require, require_not_negative
from echo_schemas.records.rollout import Sampling
from echo_schemas.records.weights import BlobRef


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClaim(Record):
    """A learner process claims the namespace. The newest claim on `steps` wins. `machine`: the machine of `pid`, so that processes there
    can tell whether this one has ended; empty if unknown."""

    SCHEMA: ClassVar[str] = "session_claim"

    run_id: str
    session: str
    host: str
    pid: int
    takeover: bool = False
    tip_version: int
    tip_checkpoint: str | None = None
    time_ms: int
    machine: str = ""

    def validate(self) -> None:
        require_not_negative(tip_version=self.tip_version)
        require(bool(self.session), "A claim names its session.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardTerm:
    """One line of a reward specification: the weight, whether a sample waits for it, and the value used if it does not come."""

    name: str
    weight: float
    required: bool = True
    default: float | None = None
    deadline_s: float | None = None
    code_version: str | None = None

    @property
    def is_awaited(self) -> bool:
        """Whether a sample waits for it: never for a reward of weight 0, which does not change the training."""
        return self.required and self.weight != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """The policy of a step: the largest age of a sample (`budget`, S), the rule for older ones (`over_budget`), and the batch size."""

    budget: int
    publication_period: int
    over_budget: str
    groups_per_step: int
    min_group_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardColumn:
    """The values of one reward over the batch: float64 [N] and a flag [N] that is 1 where the default was used."""

    name: str
    values: bytes
    defaulted: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardStats:
    """Moments of one reward over a batch or an evaluation."""

    name: str
    mean: float
    std: float
    minimum: float
    maximum: float
    stderr: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The samples of one step, in order, as columns. N samples.

    `partitions` int32 [N], `offsets` int64 [N]: the trajectory records. `seqs` int64 [N], `indices` int32 [N]. `attempts`: one token a
    group, groups in order of first appearance. `group_sizes` int32: samples per group. `advantages` float32 [N]. `order` int32 [N]: the
    training order. `micro_batches` int32: samples per micro-batch in that order. `updates` int32: micro-batches per update."""

    num_samples: int
    partitions: bytes
    offsets: bytes
    seqs: bytes
    indices: bytes
    attempts: tuple[str, ...]
    group_sizes: bytes
    rewards: tuple[RewardColumn, ...]
    advantages: bytes
    order: bytes
    micro_batches: bytes
    updates: bytes

    def check(self) -> None:
        """Raise InvalidRecord unless every column has N entries."""
        columns = (
            ("partitions", self.partitions, TOKEN_DTYPE.itemsize),
            ("offsets", self.offsets, OFFSET_DTYPE.itemsize),
            ("seqs", self.seqs, OFFSET_DTYPE.itemsize),
            ("indices", self.indices, TOKEN_DTYPE.itemsize),
            ("advantages", self.advantages, LOGPROB_DTYPE.itemsize),
            ("order", self.order, TOKEN_DTYPE.itemsize),
            *((f"rewards.{column.name}.values", column.values, VALUE_DTYPE.itemsize) for column in self.rewards),
            *((f"rewards.{column.name}.defaulted", column.defaulted, FLAG_DTYPE.itemsize) for column in self.rewards),
        )
        for name, column, width in columns:
            message = f"Column {name} has {len(column)} bytes for {self.num_samples} samples of {width}."
            require(len(column) == self.num_samples * width, message, InvalidReason.LENGTH_MISMATCH)
        message = f"{len(self.attempts)} attempts do not match the group sizes."
        require(len(self.group_sizes) == len(self.attempts) * TOKEN_DTYPE.itemsize, message, InvalidReason.LENGTH_MISMATCH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The learner's position in one partition of `trajectories`: this checkpoint accounts for the records in [low, read_to)."""

    partition: int
    low: int
    read_to: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerShare:
    """One worker's part in a step: entry i of `staleness` counts its samples of staleness i when the batch was formed. `delivered`: its
    trajectories that the learner has read since the previous report, trained or not."""

    worker_id: str
    staleness: tuple[int, ...] = ()
    delivered: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCost:
    """The cost of the workers of one kind since the previous report, by use (`echo_core.capacity.costs`). `num_workers`: heard of."""

    kind: str
    num_workers: int = 0
    busy: float = 0.0
    idle: float = 0.0
    standby: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport(Record):
    """One training step. Together with the log it is enough to train the step again.

    Staleness histograms: entry i counts samples of staleness i, for each of the four stages. `batch` is inline, or, if it is large,
    `batch_blob` names its chunks, written in the same transaction. `policy` is None in reports of releases that did not write it. `costs`,
    `learner_cost`: since the previous report; empty and 0 if no price is known.
    """

    SCHEMA: ClassVar[str] = "step_report"

    run_id: str
    session: str
    version: int
    checkpoint: str
    parent: str | None
    snapshot_sha256: str | None = None
    batch: Batch | None = None
    batch_blob: BlobRef | None = None
    seeds: Mapping[str, int] = field(default_factory=dict)
    world_size: int = 1
    reward_terms: tuple[RewardTerm, ...] = ()
    policy: StepPolicy | None = None
    positions: tuple[Position, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    staleness_dispatch: tuple[int, ...] = ()
    staleness_in_flight: tuple[int, ...] = ()
    staleness_in_queue: tuple[int, ...] = ()
    staleness_total: tuple[int, ...] = ()
    reward_stats: tuple[RewardStats, ...] = ()
    workers: tuple[WorkerShare, ...] = ()
    idle_s: float = 0.0
    training_s: float = 0.0
    costs: tuple[KindCost, ...] = ()
    learner_cost: float = 0.0
    time_ms: int

    def validate(self) -> None:
        require_not_negative(version=self.version, idle_s=self.idle_s, training_s=self.training_s, learner_cost=self.learner_cost)
        require(bool(self.checkpoint), "A step exists once a checkpoint holds it: the report must name it.")
        require((self.batch is None) != (self.batch_blob is None), "A report carries its batch inline or as a blob.")
        if self.batch is not None:
            self.batch.check()


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK:
    """The estimated probability that at least one of k samples is right."""

    k: int
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval(Record):
    """The result of one evaluation of one version, over the answered prompts; `num_missing` more were requested. `stderr` of a reward: the
    standard error of its mean, clustered by prompt."""

    SCHEMA: ClassVar[str] = "eval"

    run_id: str
    version: int
    name: str
    task: str
    num_prompts: int
    num_samples: int
    pass_at: tuple[PassAtK, ...] = ()
    rewards: tuple[RewardStats, ...] = ()
    sampling: Sampling
    seconds: float
    num_missing: int = 0
    weights_sha256: str = ""
    seed: int = 0
    pass_reward: str | None = None
    pass_from: float = 1.0
    time_ms: int

    def validate(self) -> None:
        require_not_negative(
            version=self.version,
            num_prompts=self.num_prompts,
            num_samples=self.num_samples,
            num_missing=self.num_missing,
            seconds=self.seconds,
        )
