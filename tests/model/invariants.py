"""The promises of the commit protocol, each a pure function from what is committed to its counter-examples; none means that it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from echo_core.closed_seqs import ClosedSeqs
from echo_learner.commit.learner_state import LearnerState
from echo_schemas.columns import FLAG_DTYPE, VALUE_DTYPE
from echo_schemas.records import Coordinates, Drop, Purpose, Reward, RewardOutcome, StepReport, Trajectory, WeightManifest
from tests.model.trainer import moments_of, retrained, samples_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """What the log and the disk hold at one moment, in the order of the log. Of one run.

    `trajectories`: those that a reader can decode; `dead_letters`: the others. `blobs`: the bytes that a manifest names, by version and
    checksum. `state`: the newest checkpoint that the log names, None before there is one; `trained_to`: weights and optimizer of it.
    """

    trajectories: Mapping[Coordinates, Trajectory]
    dead_letters: frozenset[Coordinates]
    refused: frozenset[Coordinates]
    rewards: Sequence[tuple[Coordinates, Reward]]
    reports: Sequence[StepReport]
    drops: Sequence[Drop]
    manifests: Sequence[WeightManifest]
    blobs: Mapping[tuple[int, str], bytes]
    state: LearnerState | None
    trained_to: tuple[bytes, bytes] | None


def one_chain(books: Books) -> Iterator[str]:
    """One report per version, and its parent is its predecessor's checkpoint."""
    versions = [report.version for report in books.reports]
    if versions != list(range(1, len(versions) + 1)):
        yield f"the reports are of versions {versions}"
    for before, after in zip(books.reports, books.reports[1:], strict=False):
        if after.parent != before.checkpoint:
            yield f"version {after.version} comes from {after.parent}; version {before.version} is kept in {before.checkpoint}"


def one_checksum(books: Books) -> Iterator[str]:
    """One checksum per version, whole in the log, named alike by its report; each names the one before."""
    found: dict[int, str] = {}
    newest = -1
    for manifest in books.manifests:
        if found.setdefault(manifest.version, manifest.sha256) != manifest.sha256:
            yield f"version {manifest.version} is public with {found[manifest.version][:8]} and {manifest.sha256[:8]}"
        if manifest.version < newest:
            yield f"version {manifest.version} is published after version {newest}"
        elif manifest.version > newest and newest >= 0 and manifest.parent_sha256 != found[newest]:
            yield f"version {manifest.version} does not name the checksum of version {newest}"
        newest = max(newest, manifest.version)
        if (manifest.version, manifest.sha256) not in books.blobs:
            yield f"version {manifest.version} names a blob that is not in the log"
    for report in books.reports:
        if report.snapshot_sha256 is not None and found.get(report.version) != report.snapshot_sha256:
            yield f"the report of version {report.version} names a snapshot that is not public"


def same_weights(books: Books) -> Iterator[str]:
    """What is public and what is kept is what the reports' batches give, trained once each in their order."""
    wanted = retrained(books.reports, books.trajectories)
    for (version, sha256), blob in books.blobs.items():
        if version not in wanted or not blob.startswith(wanted[version]):
            yield f"version {version} ({sha256[:8]}) does not hold the weights that its reports give"
    if books.state is not None and books.trained_to is not None:
        weights = wanted.get(books.state.version, b"")
        if books.trained_to != (weights, moments_of(weights)):
            yield f"the checkpoint {books.state.id} does not hold the weights that the reports give"


def rewards_judge_what_is_trained(books: Books) -> Iterator[str]:
    """The value of every trained sample is that of the first scored reward of exactly its record."""
    scored: dict[tuple[Coordinates, str], float] = {}
    for _, reward in books.rewards:
        if reward.outcome is RewardOutcome.SCORED and reward.value is not None:
            scored.setdefault((reward.of, reward.name), reward.value)
    for report in books.reports:
        assert report.batch is not None
        for column in report.batch.rewards:
            values = np.frombuffer(column.values, VALUE_DTYPE).tolist()
            defaulted = np.frombuffer(column.defaulted, FLAG_DTYPE).tolist()
            for where, value, is_default in zip(samples_of(report), values, defaulted, strict=True):
                if not is_default and scored.get((where, column.name)) != value:
                    yield f"version {report.version}: {where} was trained with {value}; judged it was {scored.get((where, column.name))}"


def one_end_each(books: Books) -> Iterator[str]:
    """Trained ⊎ dropped ⊎ dead-lettered ⊎ open = read, record by record, and seqs end once."""
    ends: Counter[Coordinates] = Counter(where for report in books.reports for where in samples_of(report))
    trained_seqs = Counter(seq for report in books.reports for seq in {books.trajectories[where].seq for where in samples_of(report)})
    ends.update(drop.what for drop in books.drops if drop.what is not None)
    yield from (f"{where} has {count} ends" for where, count in ends.items() if count > 1)
    yield from (f"{where} has an end and is a dead letter" for where in ends if where in books.dead_letters)
    yield from (f"{where} has an end and is nowhere" for where in ends if where not in books.trajectories)
    dropped_seqs = Counter(drop.seq for drop in books.drops if drop.what is None)
    yield from (f"seq {seq} is trained {count} times" for seq, count in trained_seqs.items() if count > 1)
    yield from (f"seq {seq} is dropped {count} times" for seq, count in dropped_seqs.items() if count > 1)
    yield from (f"seq {seq} is trained and dropped" for seq in trained_seqs if seq in dropped_seqs)
    if books.state is None:
        return
    assembly = books.state.assembly
    closed = ClosedSeqs(assembly.floor, assembly.closed)
    for seq in {*trained_seqs, *dropped_seqs}:
        if seq not in closed:
            yield f"seq {seq} has its end in the log and is open in the checkpoint {books.state.id}"
    for where, trajectory in books.trajectories.items():
        if trajectory.purpose is not Purpose.TRAIN or where.offset >= assembly.trajectory_read_to.get(where.partition, 0):
            continue
        if where in books.refused:
            continue
        if trajectory.seq in closed:
            if not ends[where]:
                yield f"{where} of the closed seq {trajectory.seq} was read and has no end"
        elif not ends[where] and where.offset < assembly.trajectory_lows.get(where.partition, 0):
            yield f"{where} of the open seq {trajectory.seq} will never be read again"
    yield from _lost_rewards(books, closed, ends)


def _lost_rewards(books: Books, closed: ClosedSeqs, ends: Mapping[Coordinates, int]) -> Iterator[str]:
    """The reward that an open record has is read again with it."""
    assert books.state is not None
    lows = books.state.assembly.reward_lows
    first: dict[tuple[Coordinates, str], Coordinates] = {}
    for at, reward in books.rewards:
        trajectory = books.trajectories.get(reward.of)
        if reward.of in books.refused:
            continue
        if reward.outcome is RewardOutcome.SCORED and trajectory is not None and trajectory.seq not in closed and not ends.get(reward.of):
            first.setdefault((reward.of, reward.name), at)
    for (where, name), at in first.items():
        if at.offset < lows.get(at.partition, 0):
            yield f"the reward {name!r} of the open record {where} will never be read again"


PROMISES = (one_chain, one_checksum, same_weights, rewards_judge_what_is_trained, one_end_each)


def violations(books: Books) -> list[str]:
    """Every counter-example to every promise."""
    return [f"{promise.__name__}: {found}" for promise in PROMISES for found in promise(books)]


def reopened(before: LearnerState, after: LearnerState) -> set[int]:
    """Seqs that `before` has closed and `after`, a later one of the same lineage, has not."""
    closed = ClosedSeqs(after.assembly.floor, after.assembly.closed)
    seqs = {*range(before.assembly.floor), *before.assembly.closed}
    return {seq for seq in seqs if seq not in closed}
