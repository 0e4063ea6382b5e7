"""A made-up run, written to a cluster as a run's roles would write it: for `echoswarm view --demo`, tests and the benchmark.

Answers and rewards are played (`episodes`); losses, log-probabilities and times are made up. There is only the log: no weights and no
checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from echo_bus.bus import Bus
from echo_bus.client.publisher import Publisher
from echo_core.advantages import group_advantages, has_signal
from echo_core.capacity.costs import sum_of
from echo_ops.viewer.demo.episodes import Episode, Play, Words
from echo_schemas.columns import FLAG_DTYPE, LOGPROB_DTYPE, OFFSET_DTYPE, TOKEN_DTYPE, VALUE_DTYPE, pack, pack_logprobs, pack_tokens
from echo_schemas.records import (
    Batch,
    Control,
    Coordinates,
    Drop,
    DropReason,
    FinishReason,
    KindCost,
    Mode,
    Position,
    Progress,
    Purpose,
    Reward,
    RewardAttachment,
    RewardColumn,
    RewardOutcome,
    RewardStats,
    RewardTerm,
    Run,
    Sampling,
    Span,
    StepPolicy,
    StepReport,
    Trajectory,
    VersionSpan,
    WeightFile,
    WeightKind,
    WeightManifest,
    WorkerControl,
    WorkerShare,
    WorkerState,
    WorkerStatus,
    group_id_of,
)
from echo_schemas.topics import CONTROL, DROPS, PROGRESS, REWARDS, RUNS, STEPS, TRAJECTORIES, WEIGHTS, WORKERS, weights_key

RETURN, SHADOW = "return", "my_rewards.py:brevity"
_SHADOW_FROM, _SHADOW_SHARE = 4, 0.5
_BUDGET = 3
_WAIT_S = 120.0
_LEARNER_PRICE = 3.0
# The learner waits for this share of a step's time and trains for the rest.
_IDLE_SHARE = 0.35
_WORKERS = (("gpu-0", "large", 2.4), ("cpu-0", "small", 0.3), ("cpu-1", "small", 0.3))


class StoryClock:
    """The system's clock with a time of day that the caller sets."""

    def __init__(self, start_ms: int) -> None:
        self.now_ms: int | None = start_ms

    def monotonic_s(self) -> float:
        return time.monotonic()

    def time_ms(self) -> int:
        """`now_ms`, or the system's time if it is None."""
        return time.time_ns() // 1_000_000 if self.now_ms is None else self.now_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class MadePlan:
    """The size of the run. `steps`: it has the versions (first, last]; if first is above 0, it is a fork of `parent` at that version."""

    steps: tuple[int, int] = (0, 24)
    groups_per_step: int = 12
    group_size: int = 4
    step_s: float = 8.0
    skill_per_step: float = 0.035
    parent: str | None = None
    task: str = "sokoban"
    options: dict[str, object] = field(default_factory=dict)


@dataclass(slots=True)
class _Member:
    trajectory: Trajectory
    rewards: float
    where: Coordinates | None = None


class MadeRun:
    """Writes one run. One thread; blocks until the records are acknowledged."""

    def __init__(self, bus: Bus, clock: StoryClock, plan: MadePlan, play: Play, words: Words) -> None:
        assert bus.run_id is not None, "a run has a name"
        self._bus, self._clock, self._plan, self._play, self._words = bus, clock, plan, play, words
        self._run_id, self._rng = bus.run_id, random.Random(bus.run_id)
        self._seq = 10_000 * plan.steps[0]
        self._read_to: dict[int, int] = {}
        self._trained: Counter[str] = Counter()

    def write(self) -> None:
        """Write the whole run. Raises TransportError."""
        with closing(self._bus.publisher()) as publisher:
            self._begin(publisher)
            for version in range(self._plan.steps[0] + 1, self._plan.steps[1] + 1):
                self._write_step(publisher, version)
            self._end(publisher)
            publisher.flush(_WAIT_S)

    def _begin(self, publisher: Publisher) -> None:
        plan = self._plan
        first = plan.steps[0]
        run = Run(
            run_id=self._run_id, mode=Mode.ASYNCHRONOUS, task=plan.task, model="made up: no model was trained", seed=0,
            config=json.dumps({"task": {"name": plan.task, "options": plan.options}}), staleness_budget=_BUDGET, publication_period=1,
            group_size=plan.group_size, groups_per_step=plan.groups_per_step, parent_run=plan.parent,
            parent_version=first if plan.parent else None, parent_sha256=self._sha(first, plan.parent) if plan.parent else None,
            created_ms=self._now,
        )  # fmt: skip
        publisher.publish(RUNS, run)
        self._publish_version(publisher, first)

    def _write_step(self, publisher: Publisher, version: int) -> None:
        plan, begun_ms = self._plan, self._now
        groups = [self._group(version, number, begun_ms) for number in range(plan.groups_per_step + (version % 4 == 0))]
        dropped = groups[plan.groups_per_step :]
        members = [member for group in groups for member in group]
        members.sort(key=lambda member: member.trajectory.finished_ms)
        receipts = []
        for member in members:
            self._clock.now_ms = member.trajectory.finished_ms
            receipts.append(publisher.publish(TRAJECTORIES, member.trajectory))
        for member, receipt in zip(members, receipts, strict=True):
            member.where = receipt.wait(_WAIT_S)
            self._read_to[member.where.partition] = max(self._read_to.get(member.where.partition, 0), member.where.offset + 1)
        scored = [(member.trajectory.finished_ms + self._rng.randint(80, 900), at) for at, member in enumerate(members)]
        for self._clock.now_ms, at in sorted(scored):
            self._score(publisher, members[at], version)
        self._clock.now_ms = max(begun_ms + int(1000 * plan.step_s), max(scored)[0])
        for group in dropped:
            self._drop(publisher, group, version)
        publisher.publish(STEPS, self._report(version, groups[: plan.groups_per_step]))
        self._publish_version(publisher, version)

    def _group(self, version: int, number: int, begun_ms: int) -> list[_Member]:
        """The samples of one group, by the next worker in turn, under a slightly old version."""
        plan, rng, seq = self._plan, self._rng, self._seq
        self._seq += 1
        is_late = number >= plan.groups_per_step
        age = _BUDGET + 1 if is_late else rng.choices([0, 1, 2], [5, 4, 1])[0]
        sampled = max(plan.steps[0], version - 1 - age)
        worker = _WORKERS[number % len(_WORKERS)][0]
        share = plan.step_s * 1000 / (plan.groups_per_step / len(_WORKERS) + 1)
        started_ms = begun_ms + int(share * (number // len(_WORKERS)))
        skill = min(0.95, 0.15 + plan.skill_per_step * sampled)
        members = []
        for index in range(plan.group_size):
            episode = self._play(seq, skill, rng)
            finished_ms = started_ms + int(share * rng.uniform(0.4, 0.9))
            times = (started_ms - 120, started_ms, finished_ms)
            members.append(
                _Member(self._trajectory(episode, (seq, index), (sampled, version - 1), worker, times, skill), sum(episode.rewards))
            )
        return members

    def _trajectory(
        self, episode: Episode, place: tuple[int, int], versions: tuple[int, int], worker: str, times: tuple[int, int, int], skill: float
    ) -> Trajectory:
        tokens = self._words.encode(f"{episode.prompt}\n")
        spans: list[Span] = []
        for answer, seen in zip(episode.answers, episode.observations, strict=True):
            start = len(tokens)
            tokens += self._words.encode(answer)
            spans.append(Span(start=start, end=len(tokens)))
            tokens += self._words.encode(f"\n{seen}\n" if seen else "")
        # New weights may come between two turns.
        marks = [versions[0]] * len(spans)
        if len(spans) > 1 and versions[0] < versions[1] and self._rng.random() < 0.3:
            marks[-1] += 1
        num_generated = sum(span.end - span.start for span in spans)
        logprobs = [min(-1e-4, math.log(0.3 + 0.6 * skill) * self._rng.expovariate(0.8) ** 2) for _ in range(num_generated)]
        return Trajectory(
            run_id=self._run_id, group_id=group_id_of(self._run_id, place[0]), seq=place[0], attempt="a1", index=place[1],
            group_size=self._plan.group_size, purpose=Purpose.TRAIN, task=self._plan.task, entry=episode.entry, prompt=episode.prompt,
            completion="".join(episode.answers), token_ids=pack_tokens(tokens), generated=tuple(spans), logprobs=pack_logprobs(logprobs),
            version_spans=tuple(VersionSpan(start=s.start, end=s.end, version=mark) for s, mark in zip(spans, marks, strict=True)),
            min_version=marks[0], max_version=marks[-1], weights_sha256=self._sha(marks[-1]), worker_id=worker, engine="scripted",
            sampling=Sampling(max_new_tokens=64), finish_reason=FinishReason.ENVIRONMENT, turn_rewards=episode.rewards,
            requested_ms=times[0], started_ms=times[1], finished_ms=times[2], metadata={},
        )  # fmt: skip

    def _score(self, publisher: Publisher, member: _Member, version: int) -> None:
        trajectory, where = member.trajectory, member.where
        assert where is not None, "it was acknowledged"
        values = {RETURN: (member.rewards, "")}
        if version >= self._plan.steps[0] + _SHADOW_FROM and trajectory.seq % round(1 / _SHADOW_SHARE) == 0:
            values[SHADOW] = (1 / (1 + len(trajectory.completion) / 100), "brevity")
        for name, (value, application) in values.items():
            reward = Reward(
                run_id=self._run_id, group_id=trajectory.group_id, seq=trajectory.seq, attempt=trajectory.attempt, index=trajectory.index,
                of=where, name=name, code_version="1", application=application, outcome=RewardOutcome.SCORED, value=value, seconds=0.002,
                time_ms=self._now,
            )  # fmt: skip
            publisher.publish(REWARDS, reward, partition=where.partition)

    def _drop(self, publisher: Publisher, group: Sequence[_Member], version: int) -> None:
        trajectory = group[0].trajectory
        # One drop for each record of the group, and then one for its seq.
        for what in [*(member.where for member in group), None]:
            drop = Drop(
                run_id=self._run_id, group_id=trajectory.group_id, seq=trajectory.seq, what=what, attempt=trajectory.attempt,
                why=DropReason.STALE, version=trajectory.min_version, learner_version=version - 1, num_tokens=len(trajectory.tokens),
                detail=f"sampled {version - 1 - trajectory.min_version} versions ago, the budget is {_BUDGET}", time_ms=self._now,
            )  # fmt: skip
            publisher.publish(DROPS, drop)

    def _report(self, version: int, groups: Sequence[Sequence[_Member]]) -> StepReport:
        plan, members = self._plan, [member for group in groups for member in group]
        values = np.array([member.rewards for member in members])
        ages = [version - 1 - member.trajectory.min_version for member in members]
        by_worker: dict[str, Counter[int]] = {}
        for member, age in zip(members, ages, strict=True):
            by_worker.setdefault(member.trajectory.worker_id, Counter())[age] += 1
            self._trained[member.trajectory.worker_id] += 1
        flat = sum(not has_signal(np.array([member.rewards for member in group])) for group in groups)
        hours = plan.step_s / 3600
        costs = tuple(KindCost(kind=kind, num_workers=1, busy=0.7 * price * hours, idle=0.3 * price * hours) for _, kind, price in _WORKERS)
        learner_cost = _LEARNER_PRICE * hours
        cost = sum_of(costs) + learner_cost
        return StepReport(
            run_id=self._run_id, session="made-up", version=version, checkpoint=f"v{version}-made-up", parent=f"v{version - 1}-made-up",
            batch=_batch(groups, values),
            reward_terms=(RewardTerm(name=RETURN, weight=1.0),),
            policy=StepPolicy(
                budget=_BUDGET, publication_period=1, over_budget="drop", groups_per_step=plan.groups_per_step, min_group_size=2
            ),
            positions=tuple(Position(partition=number, low=0, read_to=end) for number, end in sorted(self._read_to.items())),
            costs=costs, learner_cost=learner_cost,
            metrics=dict(self._metrics(version))
            | {"groups_without_signal": float(flat), "cost": cost, "cost_per_1000": 1000 * cost / len(members)},
            staleness_total=_histogram(ages),
            staleness_dispatch=_histogram([0] * len(ages)), staleness_in_flight=_histogram(ages),
            staleness_in_queue=_histogram([0] * len(ages)),
            reward_stats=(
                RewardStats(name=RETURN, mean=float(values.mean()), std=float(values.std()), minimum=float(values.min()),
                            maximum=float(values.max())),
            ),
            workers=tuple(
                WorkerShare(worker_id=name, staleness=_histogram(list(counts.elements()))) for name, counts in sorted(by_worker.items())
            ),
            idle_s=plan.step_s * _IDLE_SHARE, training_s=plan.step_s * (1 - _IDLE_SHARE), time_ms=self._now,
        )  # fmt: skip

    def _metrics(self, version: int) -> Iterator[tuple[str, float]]:
        noise = self._rng.gauss
        yield "entropy", max(0.05, 1.6 * math.exp(-version / 15) + noise(0, 0.03))
        yield "loss", noise(0.02, 0.01)
        yield "grad_norm", abs(noise(0.8, 0.15))
        yield "mismatch_kl", abs(noise(2e-4, 5e-5))
        yield "logprob_diff_mean", abs(noise(0.012, 0.002))
        yield "logprob_diff_max", abs(noise(0.3, 0.08))

    def _publish_version(self, publisher: Publisher, version: int) -> None:
        plan, sha = self._plan, self._sha(version)
        is_first = version == plan.steps[0]
        manifest = WeightManifest(
            run_id=self._run_id, version=version, parent=None if version == 0 else version if is_first else version - 1,
            parent_run=plan.parent if is_first else None,
            parent_sha256=self._sha(version, plan.parent) if is_first and plan.parent else None, kind=WeightKind.LORA,
            files=(WeightFile(name="adapter_model.safetensors", num_bytes=1, sha256=sha),), num_bytes=1, sha256=sha, uri="none:made-up",
            session="made-up", checkpoint=f"v{version}-made-up", next_seq=self._seq, created_ms=self._now,
        )  # fmt: skip
        publisher.publish(WEIGHTS, manifest)
        publisher.publish(WEIGHTS, manifest, key=weights_key(self._run_id, None))

    def _end(self, publisher: Publisher) -> None:
        """Write the last records of workers, learner and operator."""
        plan, version = self._plan, self._plan.steps[1]
        progress = Progress(
            run_id=self._run_id, session="made-up", version=version, published=version, groups_trained=plan.groups_per_step * version,
            groups_dropped=0, groups_ready=2, next_seq=self._seq, time_ms=self._now,
        )  # fmt: skip
        publisher.publish(PROGRESS, progress)
        for name, kind, price in _WORKERS:
            status = WorkerStatus(
                run_id=self._run_id, worker_id=name, host="here", engine="scripted", state=WorkerState.GONE, installed_version=version,
                weights_sha256=self._sha(version), rollouts_per_s=2.0, tokens_per_s=180.0, busy_s=plan.step_s * version * 0.8,
                price_per_hour=price, kind=kind, capacity=2, rollouts=self._trained[name], time_ms=self._now,
            )  # fmt: skip
            publisher.publish(WORKERS, status)
        attached = RewardAttachment(application="brevity", is_attached=True, rewards=(SHADOW,), share=_SHADOW_SHARE)
        publisher.publish(CONTROL, Control(run_id=self._run_id, epoch=1, attachment=attached, issued_by="operator", time_ms=self._now))
        dearest, reason = _WORKERS[-1][0], f"release {_WORKERS[-1][0]}: 4.1 rollouts/s without it are enough for 3.8"
        released = WorkerControl(active=False, reason=reason, figures={"rate": 4.8, "target": 3.8})
        order = Control(
            run_id=self._run_id, epoch=2, worker_id=dearest, worker=released, issued_by="coordinator", time_ms=self._now
        )  # fmt: skip
        publisher.publish(CONTROL, order)

    @property
    def _now(self) -> int:
        return self._clock.time_ms()

    def _sha(self, version: int, run_id: str | None = None) -> str:
        return hashlib.sha256(f"{run_id or self._run_id}/{version}".encode()).hexdigest()


def _histogram(ages: Sequence[int]) -> tuple[int, ...]:
    counts = Counter(ages)
    return tuple(counts[age] for age in range(max(ages) + 1))


def _batch(groups: Sequence[Sequence[_Member]], values: npt.NDArray[np.float64]) -> Batch:
    """The groups in order, with the sum of their turns' rewards as the only reward."""
    members = [member for group in groups for member in group]
    places = [member.where for member in members if member.where is not None]
    advantages = np.concatenate([group_advantages(np.array([member.rewards for member in group])) for group in groups])
    return Batch(
        num_samples=len(members), partitions=pack([place.partition for place in places], TOKEN_DTYPE),
        offsets=pack([place.offset for place in places], OFFSET_DTYPE),
        seqs=pack([member.trajectory.seq for member in members], OFFSET_DTYPE),
        indices=pack([member.trajectory.index for member in members], TOKEN_DTYPE), attempts=("a1",) * len(groups),
        group_sizes=pack([len(group) for group in groups], TOKEN_DTYPE),
        rewards=(RewardColumn(name=RETURN, values=pack(values, VALUE_DTYPE), defaulted=pack([0] * len(members), FLAG_DTYPE)),),
        advantages=pack(advantages, LOGPROB_DTYPE), order=pack(range(len(members)), TOKEN_DTYPE),
        micro_batches=pack([len(members)], TOKEN_DTYPE), updates=pack([1], TOKEN_DTYPE),
    )  # fmt: skip
