"""One sampled answer: tokens, log-probabilities under the sampler, and the versions of the weights that generated them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from echo_schemas.columns import EXPERT_DTYPES, LOGPROB_BYTES, TOKEN_BYTES, all_finite, pack, view_logprobs, view_tokens
from echo_schemas.errors import InvalidReason, InvalidRecord
from echo_schemas.records.base import Record, require_name
from echo_schemas.records.rollout import Purpose, Sampling, group_id_of


class FinishReason(StrEnum):
    """The reason why generation ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ENVIRONMENT = "environment"


class LogprobSource(StrEnum):
    """The source of the log-probabilities: the engine that drew the tokens; or the learner: then `logprobs` holds zeros, and the learner
    computes them with its weights at the start of the step that trains them (importance weight 1)."""

    SAMPLER = "sampler"
    RECOMPUTED = "recomputed"


class LogprobDistribution(StrEnum):
    """The distribution of the sampler's log-probabilities, after temperature: the one that tokens were drawn from, cut by `top_k`, `top_p`
    and `min_p` and normalised again; or the full one over the whole vocabulary. Without a cut both are equal."""

    DRAWN = "drawn"
    FULL = "full"


class TrajectorySource(StrEnum):
    """The source of a trajectory: sampled by a worker of this run, or an episode logged elsewhere (ECHO-2, appendix D)."""

    LIVE = "live"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Token positions [start, end) of `token_ids` that the policy generated."""

    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Token positions [start, end) of `token_ids` that were generated under `version`."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The experts that each token but the last was routed to while it was sampled: [T - 1, layers, per_token]. `layers`: all layers of the
    model; those without experts hold zeros. `ids`: one byte an expert, or two, little-endian, in models of more than 256. So three tokens
    in two layers with two experts each take 8 bytes."""

    layers: int
    per_token: int
    ids: bytes

    @classmethod
    def of(cls, numbers: npt.NDArray[np.unsignedinteger[Any]]) -> Experts:
        """From `numbers` [T - 1, layers, per_token], uint8 or uint16."""
        _, layers, per_token = numbers.shape
        return cls(layers=layers, per_token=per_token, ids=pack(numbers, EXPERT_DTYPES[numbers.itemsize]))

    def table(self, num_tokens: int) -> npt.NDArray[np.uint8] | npt.NDArray[np.uint16]:
        """Shape [num_tokens - 1, layers · per_token], a read-only view. Raises ValueError if the number of bytes does not fit."""
        width, rows = self.layers * self.per_token, num_tokens - 1
        dtype = EXPERT_DTYPES.get(len(self.ids) / (rows * width) if min(rows, self.layers, self.per_token) > 0 else 0.0)
        if dtype is None:
            raise ValueError(f"{len(self.ids)} bytes are not {self.per_token} experts in {self.layers} layers of {rows} tokens.")
        return np.frombuffer(self.ids, dtype).reshape(rows, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory(Record):
    """One member of a group, named `<group_id>/<attempt>/<index>` and accounted for by its coordinates.

    `token_ids` holds the whole episode, prompt included, as int32 [T]; `logprobs` one float32 per *generated* token, in order
    (natural log, after temperature), so its length is the sum of the spans in `generated`.

    No version of this run made an offline trajectory: its version spans name the newest published version at the time it was put into the
    log, which only orders it among others; `weights_sha256` is empty, and the learner computes the log-probabilities.
    """

    SCHEMA: ClassVar[str] = "trajectory"
    REPEATED: ClassVar[tuple[tuple[str, str], ...]] = (("run_id", "attempt"), ("group_size", "prompt"), ("min_version", "source"))

    run_id: str
    group_id: str
    seq: int
    attempt: str
    index: int
    group_size: int
    purpose: Purpose
    task: str
    entry: str = "{}"
    prompt: str
    completion: str
    token_ids: bytes
    generated: tuple[Span, ...]
    logprobs: bytes
    version_spans: tuple[VersionSpan, ...]
    min_version: int
    max_version: int
    weights_sha256: str
    worker_id: str
    engine: str
    sampling: Sampling
    logprob_source: LogprobSource = LogprobSource.SAMPLER
    logprob_distribution: LogprobDistribution = LogprobDistribution.DRAWN
    experts: Experts | None = None
    source: TrajectorySource = TrajectorySource.LIVE
    finish_reason: FinishReason
    turn_rewards: tuple[float, ...] = ()
    requested_ms: int
    started_ms: int
    finished_ms: int
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """`<group_id>/<attempt>/<index>`."""
        return f"{self.group_id}/{self.attempt}/{self.index}"

    @property
    def is_exempt(self) -> bool:
        """Whether the staleness budget does not apply, because no version of this run made it."""
        return self.source is TrajectorySource.OFFLINE

    @property
    def is_cut(self) -> bool:
        """Whether its log-probabilities are of a cut distribution."""
        return self.sampling.cuts and self.logprob_distribution is LogprobDistribution.DRAWN

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Shape [T], read-only view."""
        return view_tokens(self.token_ids)

    @property
    def logprob_values(self) -> npt.NDArray[np.float32]:
        """Shape [G], one per generated token, read-only view."""
        return view_logprobs(self.logprobs)

    @property
    def num_generated(self) -> int:
        """Number of generated tokens, G."""
        return len(self.logprobs) // LOGPROB_BYTES

    def forget_texts(self) -> None:
        """Empty prompt, completion and entry of a record that nobody else holds: of thousands of open ones they are most of the memory, and
        a copy without them would take as long as decoding."""
        for name in ("prompt", "completion", "entry"):
            object.__setattr__(self, name, "")

    def validate(self) -> None:
        if self.seq < 0 or self.index < 0 or self.min_version < 0:
            raise InvalidRecord(
                InvalidReason.NEGATIVE_NUMBER,
                f"seq {self.seq}, index {self.index} and min_version {self.min_version} must not be negative.",
            )
        if self.index >= self.group_size:
            raise InvalidRecord(InvalidReason.INCONSISTENT, f"index {self.index} is outside a group of {self.group_size}.")
        if self.group_id != group_id_of(self.run_id, self.seq, self.purpose):
            raise InvalidRecord(
                InvalidReason.INCONSISTENT, f"group_id {self.group_id!r} does not belong to run {self.run_id!r}, seq {self.seq}."
            )
        require_name("attempt", self.attempt)
        require_name("worker_id", self.worker_id)
        if self.is_exempt and self.logprob_source is not LogprobSource.RECOMPUTED:
            raise InvalidRecord(
                InvalidReason.INCONSISTENT,
                "The sampler's log-probabilities of an offline trajectory are unknown: the learner recomputes them.",
            )
        num_tokens, rest = divmod(len(self.token_ids), TOKEN_BYTES)
        if rest or len(self.logprobs) % LOGPROB_BYTES:
            raise InvalidRecord(InvalidReason.LENGTH_MISMATCH, "token_ids and logprobs must hold whole 4-byte numbers.")
        self._validate_spans(num_tokens)
        if not all_finite(self.logprobs):
            raise InvalidRecord(InvalidReason.NOT_FINITE, "logprobs holds a NaN or an infinity.")
        if self.experts is not None:
            try:
                self.experts.table(num_tokens)
            except ValueError as exc:
                raise InvalidRecord(InvalidReason.LENGTH_MISMATCH, str(exc)) from exc
        if self.turn_rewards and not all(map(math.isfinite, self.turn_rewards)):
            raise InvalidRecord(InvalidReason.NOT_FINITE, "turn_rewards holds a NaN or an infinity.")

    def _validate_spans(self, num_tokens: int) -> None:
        """Check that spans are ordered and inside the tokens, as long as the log-probabilities, and wholly tagged with versions."""
        if len(self.generated) == len(self.version_spans) == 1:
            (span,), (tag,) = self.generated, self.version_spans
            if (
                0 <= span.start == tag.start < span.end == tag.end <= num_tokens
                and (span.end - span.start) * LOGPROB_BYTES == len(self.logprobs)
                and self.min_version == tag.version == self.max_version
            ):
                # The fast path, for one turn under one version: nearly every trajectory.
                return
        if not self.generated:
            raise InvalidRecord(InvalidReason.LENGTH_MISMATCH, "A trajectory without a generated token cannot be trained or judged.")
        generated = _merged("generated", ((span.start, span.end) for span in self.generated), num_tokens)
        num_generated = sum(end - start for start, end in generated)
        if num_generated != self.num_generated:
            raise InvalidRecord(
                InvalidReason.LENGTH_MISMATCH, f"{num_generated} generated tokens but {self.num_generated} log-probabilities."
            )
        if _merged("version", ((tag.start, tag.end) for tag in self.version_spans), num_tokens) != generated:
            raise InvalidRecord(InvalidReason.LENGTH_MISMATCH, "The version spans do not tag exactly the tokens that were generated.")
        versions = [tag.version for tag in self.version_spans]
        if min(versions) != self.min_version or max(versions) != self.max_version:
            raise InvalidRecord(InvalidReason.INCONSISTENT, "min_version and max_version do not agree with the version spans.")


def _merged(kind: str, spans: Iterable[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    """`spans` with neighbours that touch joined. Raises InvalidRecord for an empty span and for one out of order or outside the tokens."""
    merged: list[tuple[int, int]] = []
    position = 0
    for start, end in spans:
        if not position <= start < end <= num_tokens:
            raise InvalidRecord(
                InvalidReason.LENGTH_MISMATCH, f"{kind} span [{start}, {end}) is empty, out of order or outside {num_tokens} tokens."
            )
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
        position = end
    return merged
