"""Evaluations: their specification, when they are due, and their results. Pure.

EvaluationSpec   one [[eval]] section with all defaults filled in
is_due           whether a version is evaluated
EvaluationTally  trajectories and rewards in any order → answered prompts
pass_at_k        the unbiased estimator; `reward_stats`: mean and standard error over prompts
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from echo_schemas.records import Coordinates, PassAtK, Purpose, Reward, RewardOutcome, RewardStats, Sampling, Trajectory

MOST_PROMPTS = 1_000_000
"""Prompts of one evaluation at most: the range of a seq's last part, and the distance between seeds."""
_NAMES = 1_000_000
HELD_OUT_SEED = 2_000_000_000
"""The first seed of evaluations. Some data sets make item i from seed + i, so seeds lie a whole evaluation apart, and below 2^32."""
MOST_SEED = 2_000
LEAST_DISTANCE = 1_000_000_000
"""The distance of a run's own seed from those of evaluations: more prompts than a run ever asks."""
EVALUATION = "evaluation"
"""Key of a trajectory's metadata: the evaluation that it answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSpec:
    """One evaluation. `seed`: the task's seed of its prompts. `pass_at` empty: no pass@k. `every` 0: not between start and end.
    `patience_s`: after so long without a new answer, missing prompts are requested once more, then given up."""

    name: str
    task: str
    options: Mapping[str, Any]
    rewards: tuple[str, ...]
    pass_reward: str
    pass_from: float
    pass_at: tuple[int, ...]
    prompts: int
    samples: int
    sampling: Sampling
    seed: int
    every: int
    at_start: bool
    at_end: bool
    patience_s: float


def held_out_seed(seed: int) -> int:
    """The task's seed for an evaluation whose own seed is `seed`: the same in every run, so that runs can be compared."""
    return HELD_OUT_SEED + seed * MOST_PROMPTS


def evaluation_seq(version: int, name: str, index: int) -> int:
    """The seq of prompt `index`: a function of version, name and index, so that a repeated evaluation has the same groups."""
    return (version * _NAMES + name_code(name)) * MOST_PROMPTS + index


def index_of(seq: int) -> int:
    """The index of the prompt of an evaluation's seq."""
    return seq % MOST_PROMPTS


def name_code(name: str) -> int:
    """The part of a name in its seqs. It must differ between the names of one run."""
    return zlib.crc32(name.encode()) % _NAMES


def is_due(spec: EvaluationSpec, version: int, *, is_last: bool) -> bool:
    """Whether the published `version` is evaluated: at the start, every `every` versions, at the end."""
    if version == 0:
        return spec.at_start
    return (is_last and spec.at_end) or (spec.every > 0 and version % spec.every == 0)


def due_after_restart(spec: EvaluationSpec, newest: int, published: Iterable[int], *, is_complete: bool) -> list[int]:
    """The versions to evaluate by a learner that begins at `newest`, unless they have been evaluated, oldest first. These are version 0,
    for comparison, and the newest version that was due; older missed ones can be ordered by hand. `published`: the kept versions."""
    found = [version for version in sorted(published) if version <= newest and is_due(spec, version, is_last=False)]
    chosen = {version for version in found if version == 0} | set(found[-1:])
    if is_complete and spec.at_end and newest in set(published):
        chosen.add(newest)
    return sorted(chosen)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """The unbiased estimate of the probability that at least one of k samples is right, from `num_samples` ≥ k with `num_right` right ones.

    1 − C(n − c, k) / C(n, k), as a product so that no factorial overflows (Chen et al. 2021, arXiv 2107.03374, section 2.1). Raises
    ValueError for contradictory numbers."""
    if not (0 <= num_right <= num_samples and 1 <= k <= num_samples):
        message = f"pass@{k} cannot be estimated from {num_samples} samples of which {num_right} are right."
        raise ValueError(message)
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_right + 1, num_samples + 1))


def reward_stats(name: str, by_prompt: Sequence[Sequence[float]]) -> RewardStats:
    """Moments of one reward over all samples, and the standard error of the mean over prompts.

    Samples of one prompt are alike, so prompts are the independent draws: the error is that of the mean of the prompts' means (clustered
    standard error, Miller 2024, arXiv 2411.00640, section 2.2); 0 for a single prompt. Raises ValueError without samples."""
    values = [value for prompt in by_prompt for value in prompt]
    if not values or not all(by_prompt):
        message = f"Reward {name!r} has a prompt without samples."
        raise ValueError(message)
    mean = math.fsum(values) / len(values)
    num_prompts = len(by_prompt)
    residuals = [math.fsum(value - mean for value in prompt) for prompt in by_prompt]
    # For prompts of equal size equal to the standard deviation of their means over the root of their number.
    spread = math.fsum(residual**2 for residual in residuals) * num_prompts / (num_prompts - 1) if num_prompts > 1 else 0.0
    return RewardStats(
        name=name,
        mean=mean,
        std=statistics.pstdev(values),
        minimum=min(values),
        maximum=max(values),
        stderr=math.sqrt(spread) / len(values),
    )


@dataclass(slots=True)
class _Attempt:
    """One worker's answer to one prompt, under assembly: the places of its records by index."""

    members: dict[int, Coordinates] = field(default_factory=dict)
    sha256: str = ""


class EvaluationTally:
    """Collects the answers of one evaluation of one version. Ignores records of others. One thread at a time uses it. A prompt is answered
    by its first complete attempt. It is settled when each of the attempt's records has an outcome of each reward, and counts if all of
    these are values: a prompt with a missing value is left out, not counted as wrong."""

    def __init__(self, spec: EvaluationSpec, version: int, entry_of: Callable[[int], str] | None = None) -> None:
        """`entry_of`: the entry of a prompt, by index, to compare with an answer's. None: it is not compared."""
        self._spec = spec
        self._entry_of = entry_of
        self._version = version
        first = evaluation_seq(version, spec.name, 0)
        self._seqs = range(first, first + spec.prompts)
        self._attempts: dict[int, dict[str, _Attempt]] = {}
        self._chosen: dict[int, _Attempt] = {}
        # By record and reward name, (offset, value) of the best reward: one with a value, then the one with the lowest offset.
        self._verdicts: dict[Coordinates, dict[str, tuple[int, float | None]]] = {}
        self._settled: set[int] = set()
        self.num_refused = 0
        """Trajectories that do not fit the request: another version, group size, sampling or entry."""

    def add_trajectory(self, where: Coordinates, trajectory: Trajectory) -> bool:
        """Take a trajectory; return whether it was new."""
        if trajectory.purpose is not Purpose.EVAL or trajectory.seq not in self._seqs or trajectory.seq in self._chosen:
            return False
        if not self._is_as_asked(trajectory):
            self.num_refused += 1
            return False
        attempts = self._attempts.setdefault(trajectory.seq, {})
        attempt = attempts.setdefault(trajectory.attempt, _Attempt())
        if attempt.members.setdefault(trajectory.index, where) != where:
            return False
        attempt.sha256 = trajectory.weights_sha256
        if len(attempt.members) == self._spec.samples:
            self._chosen[trajectory.seq] = attempt
            del self._attempts[trajectory.seq]
            self._settle(trajectory.seq)
        return True

    def add_reward(self, at: Coordinates, reward: Reward) -> bool:
        """Take a reward, which lies at `at`; return whether it was new. It may come before its trajectory."""
        if reward.seq not in self._seqs or reward.name not in self._spec.rewards or reward.seq in self._settled:
            return False
        verdicts = self._verdicts.setdefault(reward.of, {})
        known, value = verdicts.get(reward.name), reward.value if reward.outcome is RewardOutcome.SCORED else None
        if known is not None and (value is None, at.offset) >= (known[1] is None, known[0]):
            return False
        verdicts[reward.name] = (at.offset, value)
        self._settle(reward.seq)
        return True

    @property
    def num_settled(self) -> int:
        return len(self._settled)

    @property
    def is_complete(self) -> bool:
        """Whether every prompt is settled."""
        return len(self._settled) == self._spec.prompts

    def unsettled(self) -> list[int]:
        """Indices of the prompts that are not settled."""
        return [index_of(seq) for seq in self._seqs if seq not in self._settled]

    def results(self) -> EvaluationResults:
        """The results of the settled prompts."""
        rewards: dict[str, list[list[float]]] = {name: [] for name in self._spec.rewards}
        num_answered = 0
        sha256 = ""
        for seq in sorted(self._settled):
            attempt = self._chosen[seq]
            columns = {name: [self._verdicts[where][name][1] for _, where in sorted(attempt.members.items())] for name in rewards}
            if any(value is None for column in columns.values() for value in column):
                continue
            num_answered += 1
            sha256 = attempt.sha256
            for name, column in columns.items():
                rewards[name].append([value for value in column if value is not None])
        return EvaluationResults(
            num_prompts=num_answered, num_missing=self._spec.prompts - num_answered, rewards=rewards, weights_sha256=sha256
        )

    def _is_as_asked(self, trajectory: Trajectory) -> bool:
        versions = {trajectory.min_version, trajectory.max_version}
        if versions != {self._version} or (trajectory.group_size, trajectory.sampling) != (self._spec.samples, self._spec.sampling):
            return False
        return self._entry_of is None or trajectory.entry == self._entry_of(index_of(trajectory.seq))

    def _settle(self, seq: int) -> None:
        attempt = self._chosen.get(seq)
        if attempt is None:
            return
        wanted = set(self._spec.rewards)
        if all(wanted <= self._verdicts.get(where, {}).keys() for where in attempt.members.values()):
            self._settled.add(seq)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResults:
    """The answered prompts: for each reward its values by prompt. `weights_sha256`: the checksum of the evaluated snapshot."""

    num_prompts: int
    num_missing: int
    rewards: Mapping[str, Sequence[Sequence[float]]]
    weights_sha256: str

    def stats(self) -> tuple[RewardStats, ...]:
        """Moments of every reward. Raises ValueError if no prompt was answered."""
        return tuple(reward_stats(name, by_prompt) for name, by_prompt in self.rewards.items())

    def pass_at(self, spec: EvaluationSpec) -> tuple[PassAtK, ...]:
        """pass@k for every k of `spec`, the mean over prompts. Raises ValueError if no prompt was answered."""
        counts = [(len(prompt), sum(value >= spec.pass_from for value in prompt)) for prompt in self.rewards[spec.pass_reward]]
        return tuple(PassAtK(k=k, value=statistics.fmean(pass_at_k(n, right, k) for n, right in counts)) for k in spec.pass_at)
