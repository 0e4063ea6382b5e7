"""The request to a worker, and the worker's receipt in sequential mode."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from echo_schemas.columns import TOKEN_BYTES
from echo_schemas.errors import InvalidReason
from echo_schemas.records.base import Coordinates, Record, require, require_not_negative


class Purpose(StrEnum):
    """The purpose of a group. Only `train` groups are ever trained."""

    TRAIN = "train"
    EVAL = "eval"
    PROBE = "probe"


class ReplyOutcome(StrEnum):
    """The outcome of a request."""

    DONE = "done"
    NOT_READY = "not_ready"
    FAILED = "failed"
    EXPIRED = "expired"


def group_id_of(run_id: str, seq: int, purpose: Purpose = Purpose.TRAIN) -> str:
    """`<run>/<seq>` for training groups, `<run>/<purpose>-<seq>` for the others, which have seqs of their own."""
    return f"{run_id}/{seq}" if purpose == Purpose.TRAIN else f"{run_id}/{purpose}-{seq}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn of a prompt in chat form."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling options. The defaults sample from the full distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def cuts(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest(Record):
    """One prompt to sample `group_size` times. Exactly one of `messages` and `prompt_token_ids` is given. `evaluation`: the evaluation of a
    request of purpose `eval`."""

    SCHEMA: ClassVar[str] = "rollout_request"

    run_id: str
    group_id: str
    seq: int
    purpose: Purpose
    task: str
    messages: tuple[ChatMessage, ...] = ()
    prompt_token_ids: bytes = b""
    entry: str = "{}"
    group_size: int
    sampling: Sampling
    required_version: int
    exact: bool = False
    learner_version: int
    issued_ms: int
    deadline_ms: int | None = None
    correlation: str | None = None
    resends: int = 0
    evaluation: str | None = None

    def validate(self) -> None:
        require_not_negative(
            seq=self.seq, required_version=self.required_version, learner_version=self.learner_version, deadline_ms=self.deadline_ms
        )
        require(self.group_size >= 1, f"group_size is {self.group_size}; a group has at least one sample.")
        has_one = bool(self.messages) != bool(self.prompt_token_ids)
        require(has_one, "A request carries either messages or prompt_token_ids, not both and not neither.")
        is_whole = len(self.prompt_token_ids) % TOKEN_BYTES == 0
        require(is_whole, "prompt_token_ids is not a whole number of 4-byte token ids.", InvalidReason.LENGTH_MISMATCH)
        is_ours = self.group_id == group_id_of(self.run_id, self.seq, self.purpose)
        require(is_ours, f"group_id {self.group_id!r} does not belong to run {self.run_id!r}, seq {self.seq}.")
        require(self.sampling.max_new_tokens >= 1, "sampling.max_new_tokens must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutReply(Record):
    """A receipt: the places of one request's trajectories, or why there are none."""

    SCHEMA: ClassVar[str] = "rollout_reply"

    run_id: str
    correlation: str
    group_id: str
    attempt: str
    worker_id: str
    outcome: ReplyOutcome
    version: int
    weights_sha256: str
    where: tuple[Coordinates, ...] = ()
    error: str | None = None
    time_ms: int

    def validate(self) -> None:
        require_not_negative(version=self.version)
        require(bool(self.correlation), "A reply without a correlation id answers no request.")
        require(
            (self.outcome == ReplyOutcome.DONE) == bool(self.where),
            f"A reply with outcome {self.outcome} names {len(self.where)} trajectories; `done` names at least one, the others none.",
        )
