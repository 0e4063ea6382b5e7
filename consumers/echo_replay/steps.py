"""A training step as the log tells it: the report, and its batch as arrays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.errors import BlobCorrupt, DeadlineExceeded, OffsetLost
from echo_replay.raw_log import RawLog
from echo_schemas.columns import LOGPROB_DTYPE, OFFSET_DTYPE, TOKEN_DTYPE
from echo_schemas.errors import InvalidRecord
from echo_schemas.records import Batch, RewardColumn, StepReport
from echo_schemas.topics import STEPS

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# `steps` has one partition: reports are in one order.
_STEPS_PARTITION = 0


def _no_numbers() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """A report, and its batch as arrays of one entry a sample. `offset`: of the report on `steps`. `groups`: number of the sample's group
    in the batch; `attempts`: `hash` of its group's token, as in `TrajectoryIndex`. `rewards`: the columns of the batch. `missing`: why the
    batch could not be read; the arrays are empty then."""

    report: StepReport
    offset: int
    partitions: Ints = field(default_factory=_no_numbers)
    offsets: Ints = field(default_factory=_no_numbers)
    seqs: Ints = field(default_factory=_no_numbers)
    indices: Ints = field(default_factory=_no_numbers)
    groups: Ints = field(default_factory=_no_numbers)
    attempts: Ints = field(default_factory=_no_numbers)
    advantages: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    tokens: tuple[str, ...] = ()
    rewards: tuple[RewardColumn, ...] = ()
    missing: str = ""
    corrupt: bool = False

    @property
    def version(self) -> int:
        """The version that the step made."""
        return self.report.version

    @property
    def is_sequential(self) -> bool:
        """Whether the learner asked for exactly this step's samples."""
        return "requests_sent" in self.report.metrics


def batch_of(bus: Bus, report: StepReport) -> Batch:
    """The report's batch, inline or from its blob. Raises BlobCorrupt, OffsetLost (removed by retention), DeadlineExceeded."""
    if report.batch is not None:
        return report.batch
    assert report.batch_blob is not None, "a report has one of the two"
    try:
        whole = bus.codec.decode(bus.blob_reader().read(report.batch_blob, report.run_id))
    except InvalidRecord as exc:
        raise BlobCorrupt(f"The blob {report.batch_blob.blob} holds no report: {exc.message}") from exc
    if not isinstance(whole, StepReport) or whole.batch is None or whole.version != report.version:
        raise BlobCorrupt(f"The blob {report.batch_blob.blob} does not hold the report of version {report.version}.")
    return whole.batch


def read_batch(bus: Bus, step: Step) -> Batch:
    """Read the batch of a step again: a `Step` keeps only arrays of it. Raises as `batch_of`."""
    with RawLog(bus, bus.namespace.topic(STEPS), profiles.GLIMPSE) as steps:
        for raw in steps.between(_STEPS_PARTITION, [step.offset]):
            record = bus.codec.decode(raw.value())
            if isinstance(record, StepReport) and record.run_id == step.report.run_id:
                return batch_of(bus, record)
    raise OffsetLost(f"The report of version {step.version} is no longer at offset {step.offset} of steps.")


def step_of(bus: Bus, report: StepReport, offset: int) -> Step:
    """The step of a report at `offset`; why its batch cannot be read is noted in the step."""
    try:
        return _filled_step(report, offset, batch_of(bus, report))
    except OffsetLost as exc:
        return Step(report=report, offset=offset, missing=exc.message)
    except (BlobCorrupt, DeadlineExceeded) as exc:
        return Step(report=report, offset=offset, missing=exc.message, corrupt=True)
    except ValueError as exc:
        missing = f"the columns of its batch contradict one another ({exc})"
        return Step(report=report, offset=offset, missing=missing, corrupt=True)


def _filled_step(report: StepReport, offset: int, batch: Batch) -> Step:
    """Raises ValueError if the columns do not fit together."""
    sizes = np.frombuffer(batch.group_sizes, TOKEN_DTYPE)
    groups = np.repeat(np.arange(len(sizes)), sizes)
    if len(groups) != batch.num_samples:
        message = f"groups of {len(groups)} samples for {batch.num_samples}"
        raise ValueError(message)
    keys = np.array([hash(attempt.encode()) for attempt in batch.attempts], np.int64)
    return Step(
        # The arrays below hold what an audit needs of the batch.
        report=replace(report, batch=None),
        offset=offset,
        partitions=np.frombuffer(batch.partitions, TOKEN_DTYPE).astype(np.int64),
        offsets=np.frombuffer(batch.offsets, OFFSET_DTYPE),
        seqs=np.frombuffer(batch.seqs, OFFSET_DTYPE),
        indices=np.frombuffer(batch.indices, TOKEN_DTYPE).astype(np.int64),
        groups=groups,
        attempts=keys[groups],
        advantages=np.frombuffer(batch.advantages, LOGPROB_DTYPE),
        tokens=batch.attempts,
        rewards=batch.rewards,
    )
