"""Checks of the published weights and of the samples made with them: versions, bytes, tags, staleness."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise

import numpy as np

from echo_bus.bus import Bus
from echo_bus.errors import BlobCorrupt, DeadlineExceeded, OffsetLost, TransportError
from echo_core.policy import OverBudget
from echo_replay.books import Samples
from echo_replay.run_log import RunLog
from echo_replay.steps import Step
from echo_replay.trajectory_index import Kind, TrajectoryIndex
from echo_replay.verdicts import Finding, Promise
from echo_schemas.records import Run, WeightManifest
from echo_schemas.topics import WEIGHT_CHUNKS

_READ_AT_ONCE = 8 << 20


def check_versions(log: RunLog) -> Finding:
    """Check that `current` never goes back, and that a version has one checksum in all manifests and reports."""
    finding = Finding(Promise.VERSIONS, num_looked_at=len(log.manifests))
    current = [manifest for _, is_current, manifest in log.manifests if is_current]
    for before, after in pairwise(current):
        if after.version < before.version:
            finding.broken("`current` went back to an older version.", version=after.version, before=before.version)
    for version, found in sorted(checksums_of(log).items()):
        if len(found) > 1:
            finding.broken("A version was published with different bytes.", version=version, sha256=sorted(found))
    inherited = log.inherited
    for _, _, manifest in log.manifests:
        if manifest.parent_run is not None and manifest.version == inherited.version and manifest.sha256 != inherited.sha256:
            finding.broken("A fork begins with other bytes than its parent had.", version=manifest.version, parent=manifest.parent_run)
    own = {manifest.version for _, is_current, manifest in log.manifests if not is_current}
    for version in sorted({manifest.version for manifest in current} - own):
        finding.broken("`current` names a version that has no manifest of its own.", version=version)
    for step in log.steps:
        if step.report.snapshot_sha256 is not None and step.version not in own:
            finding.broken("A report names a snapshot whose manifest is not in the log.", version=step.version)
    if number := log.unreadable.get("weights"):
        finding.gap(f"{number} messages on weights are no records")
    return finding


def checksums_of(log: RunLog) -> dict[int, set[str]]:
    """By published version, the checksums that manifests and reports name."""
    found: dict[int, set[str]] = defaultdict(set)
    for _, _, manifest in log.manifests:
        found[manifest.version].add(manifest.sha256)
    for step in log.steps:
        if step.report.snapshot_sha256 is not None:
            found[step.version].add(step.report.snapshot_sha256)
    return dict(found)


def check_blobs(bus: Bus, log: RunLog) -> Finding:
    """Fetch and hash the bytes that each manifest names. Those of `current` must exist; retention may have removed older ones."""
    newest = {manifest.version: manifest for _, _, manifest in log.manifests}
    current = max(newest, default=None)
    finding = Finding(Promise.CURRENT, num_looked_at=len(newest))
    for version, found in sorted(_hashed(bus, log.run_id, newest), key=lambda each: each[0]):
        match found:
            case OffsetLost() if version == current:
                finding.broken(f"`current` names what retention has removed: {found.message}", version=version)
            case OffsetLost():
                finding.gap("retention has removed the blobs of old versions")
            case FileNotFoundError() if version != current:
                finding.gap("the store does not keep the snapshots of old versions")
            case BlobCorrupt() | DeadlineExceeded() | OSError():
                finding.broken(f"A manifest names what is not there whole: {found}", version=version, is_current=version == current)
            case Exception():
                raise found
            case _ if found != newest[version].sha256:
                finding.broken("The bytes of a version are not those that its manifest names.", version=version, sha256=found)
    return finding


def _hashed(bus: Bus, run_id: str, manifests: Mapping[int, WeightManifest]) -> Iterator[tuple[int, str | TransportError | OSError]]:
    """Each version with the checksum of its bytes, or the error of reading them."""
    in_log = [(version, manifest.blob) for version, manifest in manifests.items() if manifest.blob is not None]
    with closing(bus.blob_reader()) as blobs:
        if in_log:
            blobs.warm(WEIGHT_CHUNKS)
        for number, found in blobs.read_each([blob for _, blob in in_log], run_id):
            version, blob = in_log[number]
            # The reader has compared the bytes with the reference's checksum.
            yield version, found if isinstance(found, TransportError) else blob.sha256
    for version, manifest in manifests.items():
        if manifest.blob is None:
            try:
                yield version, _sha256_in_store(manifest)
            except OSError as exc:
                yield version, exc


def check_tags(log: RunLog, index: TrajectoryIndex, samples: Samples) -> Finding:
    """Check that the versions that a trained sample names were published, the newest of them with the checksum that the sample names."""
    finding = Finding(Promise.TAGS)
    published = checksums_of(log)
    known = np.array(sorted(published), np.int64)
    num_removed = num_others = 0
    for number, partition in index.partitions.items():
        live = partition.kinds == Kind.LIVE
        pairs = np.stack([partition.newest, partition.checksums.astype(np.int64)], axis=1)
        unique, inverse = np.unique(pairs, axis=0, return_inverse=True)
        good = np.array(
            [index.checksums[which] in published.get(version, ()) if which >= 0 else False for version, which in unique.tolist()]
        )
        fits = (good[inverse.reshape(-1)] if len(unique) else np.zeros(0, np.bool_)) & np.isin(partition.oldest, known)
        mine = np.flatnonzero(samples.partitions == number)
        places, found = partition.find(samples.offsets[mine])
        num_removed += int((~found).sum())
        trained = np.zeros(len(partition.offsets), np.bool_)
        trained[places[found]] = True
        finding.num_looked_at += int((trained & live).sum())
        num_others += int((~fits & live & ~trained).sum())
        for at in np.flatnonzero(~fits & live & trained).tolist():
            finding.broken(
                "A trained sample names weights that were not published as that version.",
                partition=number,
                offset=int(partition.offsets[at]),
                seq=int(partition.seqs[at]),
                version=int(partition.newest[at]),
                sha256=index.checksums[int(partition.checksums[at])],
            )
    if num_removed:
        finding.gap(f"{num_removed} trained records are not in the log any more")
    if num_others:
        finding.note(f"{num_others} records that were not trained name other weights than those that were published")
    return finding


def check_staleness(log: RunLog, index: TrajectoryIndex, samples: Samples) -> Finding:
    """Check 0 ≤ learner version − oldest version ≤ S for every live sample; above S only if the run's policy keeps such samples."""
    finding = Finding(Promise.STALENESS)
    ages = np.full(len(samples.offsets), -1, np.int64)
    exempt = np.zeros(len(samples.offsets), np.bool_)
    found_all = np.zeros(len(samples.offsets), np.bool_)
    for number, partition in index.partitions.items():
        mine = np.flatnonzero(samples.partitions == number)
        places, found = partition.find(samples.offsets[mine])
        there, where = mine[found], places[found]
        found_all[there] = True
        exempt[there] = partition.kinds[where] == Kind.OFFLINE
        ages[there] = samples.versions[there] - 1 - partition.oldest[where]
    if (num_removed := int((~found_all).sum())) > 0:
        finding.gap(f"{num_removed} trained records are not in the log any more")
    ages[exempt] = 0
    finding.num_looked_at = int(found_all.sum())
    policies = [_policy_at(log.runs, step) for step in log.steps]
    if any(budget is None for budget, _ in policies):
        finding.gap("neither the reports nor `runs` say what the policy of this run allows")
    for number, step in enumerate(log.steps):
        mine = np.flatnonzero((samples.steps == number) & found_all)
        budget, keeps_older = policies[number]
        late = np.zeros(len(mine), np.bool_) if budget is None or keeps_older else ages[mine] > budget
        for at in mine[(ages[mine] < 0) | late].tolist():
            age = int(ages[at])
            finding.broken(
                "A sample was trained that its policy does not allow.",
                partition=int(samples.partitions[at]),
                offset=int(samples.offsets[at]),
                seq=int(samples.seqs[at]),
                version=step.version,
                staleness=age,
                budget=budget,
            )
        if len(mine) == len(step.offsets) and len(mine) and (ages[mine] >= 0).all():
            counted = np.bincount(ages[mine], minlength=len(step.report.staleness_total)).tolist()
            if step.report.staleness_total and counted != list(step.report.staleness_total):
                finding.broken(
                    "A report counts another staleness than its samples have.",
                    version=step.version,
                    reported=list(step.report.staleness_total),
                    counted=counted,
                )
    return finding


def _policy_at(runs: Sequence[Run], step: Step) -> tuple[int | None, bool]:
    """The budget in force at a step, and whether older samples may stay in its batch (with less weight, or none). A sequential step takes
    only samples of its own version. Other steps have their policy in the report. Reports of earlier releases lack it: then the newest
    record on `runs` that is not younger than the step counts; if compaction left only a younger one, that one."""
    if step.is_sequential:
        return 0, False
    policy = step.report.policy
    if policy is not None:
        return policy.budget, policy.over_budget != OverBudget.DROP
    before = [run for run in runs if run.created_ms <= step.report.time_ms]
    if not runs:
        return None, False
    run = before[-1] if before else runs[0]
    try:
        staleness = json.loads(run.config).get("staleness", {})
    except ValueError:
        return run.staleness_budget, False
    budget = staleness.get("budget", run.staleness_budget)
    return int(budget), staleness.get("over_budget", OverBudget.DROP) != OverBudget.DROP


def _sha256_in_store(manifest: WeightManifest) -> str:
    """Raises OSError."""
    digest = hashlib.sha256()
    for piece in read_from_store(manifest):
        digest.update(piece)
    return digest.hexdigest()


def read_from_store(manifest: WeightManifest) -> Iterator[bytes]:
    """The bytes of a snapshot's files in the object store, in order, in pieces. Raises OSError."""
    import fsspec

    files, root = fsspec.core.url_to_fs(manifest.uri)
    for file in manifest.files:
        with files.open(f"{root}/{file.name}", "rb") as content:
            while piece := content.read(_READ_AT_ONCE):
                yield piece
