"""All records, by name. `RECORDS` is the closed list that the codec knows."""

from __future__ import annotations

from echo_schemas.records.base import Coordinates, Record
from echo_schemas.records.reward import Drop, DropReason, Reward, RewardOutcome
from echo_schemas.records.rollout import (
    ChatMessage,
    Purpose,
    ReplyOutcome,
    RolloutReply,
    RolloutRequest,
    Sampling,
    group_id_of,
)
from echo_schemas.records.status import (
    Control,
    Mode,
    Progress,
    RewardControl,
    Run,
    RunControl,
    RunState,
    WorkerControl,
    WorkerState,
    WorkerStatus,
)
from echo_schemas.records.step import (
    Batch,
    Eval,
    PassAtK,
    Position,
    RewardColumn,
    RewardStats,
    RewardTerm,
    SessionClaim,
    StepReport,
)
from echo_schemas.records.trajectory import FinishReason, LogprobSource, Span, Trajectory, VersionSpan
from echo_schemas.records.weights import BlobRef, Chunk, ChunkRef, WeightFile, WeightKind, WeightManifest

RECORDS: tuple[type[Record], ...] = (
    RolloutRequest,
    RolloutReply,
    Trajectory,
    Reward,
    Drop,
    WeightManifest,
    Chunk,
    SessionClaim,
    StepReport,
    Eval,
    Run,
    Progress,
    WorkerStatus,
    Control,
)

__all__ = [
    "RECORDS",
    "Batch",
    "BlobRef",
    "ChatMessage",
    "Chunk",
    "ChunkRef",
    "Control",
    "Coordinates",
    "Drop",
    "DropReason",
    "Eval",
    "FinishReason",
    "LogprobSource",
    "Mode",
    "PassAtK",
    "Position",
    "Progress",
    "Purpose",
    "Record",
    "ReplyOutcome",
    "Reward",
    "RewardColumn",
    "RewardControl",
    "RewardOutcome",
    "RewardStats",
    "RewardTerm",
    "RolloutReply",
    "RolloutRequest",
    "Run",
    "RunControl",
    "RunState",
    "Sampling",
    "SessionClaim",
    "Span",
    "StepReport",
    "Trajectory",
    "VersionSpan",
    "WeightFile",
    "WeightKind",
    "WeightManifest",
    "WorkerControl",
    "WorkerState",
    "WorkerStatus",
    "group_id_of",
]
