"""The logical topics: the records and the key of each. Partitions, retention and owners are in `topics/*.yaml`.

    requests ─▶ workers ─▶ trajectories ─▶ reward processors ─▶ rewards ─▶ learner ─▶ steps, drops, evals, weights (+ weights.chunks)
    replies: sequential mode's receipts      progress, workers, control, runs: state, compacted

A physical name is the namespace and the logical name (`naming.Namespace`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from echo_schemas.records import (
    Chunk,
    Control,
    Drop,
    Eval,
    MissingRewards,
    Progress,
    Record,
    Reward,
    RolloutReply,
    RolloutRequest,
    Run,
    SessionClaim,
    StepReport,
    Trajectory,
    WeightManifest,
    WorkerStatus,
)

KeyFunction = Callable[[Any], str]
OWN_APPLICATION = "main"
"""The name of a run's own reward application; others are attached."""


@dataclass(frozen=True, slots=True)
class Topic:
    """A logical topic. `key` makes a record's key; None: the writer chooses the partition and the record has no key.

    `placed`: the writer names the partition of a key (a reply goes to its requester, a reward beside its trajectory), so readers do not
    check it. `dead_letters`: holds refused messages, which a reader must not refuse again. `author`: the name that must sign a record, on a
    topic with many writers; None: records are not signed.
    """

    name: str
    records: tuple[type[Record], ...]
    key: KeyFunction | None
    compacted: bool = False
    placed: bool = False
    dead_letters: bool = False
    author: Callable[[Any], str] | None = None

    def key_of(self, record: Record) -> str | None:
        """The key under which `record` is published."""
        return None if self.key is None else self.key(record)


def _run_id(record: Any) -> str:
    return str(record.run_id)


def _group_id(record: Any) -> str:
    return str(record.group_id)


def weights_key(run_id: str, version: int | None) -> str:
    """`<run>/v/<n>` for one version, `<run>/current` (version None) for the newest."""
    return f"{run_id}/current" if version is None else f"{run_id}/v/{version}"


def missing_rewards_key(run_id: str) -> str:
    """`<run>/missing_rewards`: a key on the topic of the run's progress."""
    return f"{run_id}/missing_rewards"


def attachment_key(run_id: str, application: str) -> str:
    """`<run>/reward/<application>`: the key of the orders to one reward application."""
    return f"{run_id}/reward/{application}"


def worker_order_key(run_id: str, worker_id: str) -> str:
    """`<run>/worker/<id>`: the key of the orders to one worker."""
    return f"{run_id}/worker/{worker_id}"


def control_key(control: Control) -> str:
    """`<run>/worker/<id>`, `<run>/rewards`, `<run>/reward/<application>`, `<run>/run` or `<run>/eval/<version>/<name>`."""
    if control.worker is not None and control.worker_id is not None:
        return worker_order_key(control.run_id, control.worker_id)
    if control.evaluation is not None:
        return f"{control.run_id}/eval/{control.evaluation.version}/{control.evaluation.name}"
    if control.attachment is not None:
        return attachment_key(control.run_id, control.attachment.application)
    return f"{control.run_id}/{'rewards' if control.rewards is not None else 'run'}"


REQUESTS = Topic("requests", (RolloutRequest,), None)
REQUESTS_DEAD = Topic("requests.dlq", (RolloutRequest,), None, dead_letters=True)
"""The requests among the dead letters of `requests`; its topic file is derived."""
REPLIES = Topic("replies", (RolloutReply,), lambda reply: str(reply.correlation), placed=True)
TRAJECTORIES = Topic("trajectories", (Trajectory,), _group_id, author=lambda trajectory: str(trajectory.worker_id))
REWARDS = Topic("rewards", (Reward,), _group_id, placed=True, author=lambda reward: str(reward.name))
STEPS = Topic("steps", (StepReport, SessionClaim, Chunk), _run_id, placed=True)
DROPS = Topic("drops", (Drop,), _group_id)
EVALS = Topic("evals", (Eval,), _run_id)
PROGRESS = Topic(
    "progress",
    (Progress, MissingRewards),
    lambda record: missing_rewards_key(record.run_id) if isinstance(record, MissingRewards) else _run_id(record),
    compacted=True,
)
WEIGHTS = Topic(
    "weights",
    (WeightManifest,),
    lambda manifest: weights_key(manifest.run_id, manifest.version),
    compacted=True,
    placed=True,
)
WEIGHT_CHUNKS = Topic("weights.chunks", (Chunk,), lambda chunk: f"{chunk.run_id}/{chunk.blob}/{chunk.index}", placed=True)
WORKERS = Topic("workers", (WorkerStatus,), lambda status: str(status.worker_id), compacted=True)
CONTROL = Topic("control", (Control,), control_key, compacted=True)
RUNS = Topic("runs", (Run,), _run_id, compacted=True)

TOPICS: tuple[Topic, ...] = (
    REQUESTS,
    REPLIES,
    TRAJECTORIES,
    REWARDS,
    STEPS,
    DROPS,
    EVALS,
    PROGRESS,
    WEIGHTS,
    WEIGHT_CHUNKS,
    WORKERS,
    CONTROL,
    RUNS,
)

BY_NAME: dict[str, Topic] = {topic.name: topic for topic in TOPICS}
