"""Checks of seqs, steps and requests of one run: each counted once, none left out, each step made from the one before. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Set
from itertools import pairwise

import numpy as np

from echo_replay.books import Samples, unknown_records, unknown_samples
from echo_replay.run_log import RunLog
from echo_replay.steps import Step
from echo_replay.verdicts import Finding, Promise
from echo_schemas.headers import number_of

# Seqs named in one counter-example.
_NAMED = 8


def check_seqs(log: RunLog, samples: Samples) -> Finding:
    """Check that no seq is trained twice, none is both trained and dropped, and each one below the floor is closed."""
    trained = _versions_of_seqs(samples)
    finding = Finding(Promise.SEQS, num_looked_at=len(trained))
    for seq, versions in trained.items():
        if len(versions) > 1:
            finding.broken("A seq was trained in several steps.", seq=seq, versions=versions)
        if seq in log.inherited.trained:
            run_id, version = log.inherited.trained[seq]
            finding.broken("A seq was trained in this run and before it was forked.", seq=seq, versions=versions, parent=run_id, at=version)
    dropped = Counter(drop.seq for drop in log.drops if drop.what is None)
    for drop in log.drops:
        if drop.what is None and drop.seq in trained:
            finding.broken("A seq was trained and dropped.", seq=drop.seq, versions=trained[drop.seq], why=drop.why.value)
    for seq, times in dropped.items():
        if times > 1:
            finding.broken("A seq was dropped more than once.", seq=seq, times=times)
    _check_floors(finding, log, set(trained) | set(dropped) | log.inherited.closed)
    if log.inherited.doubt:
        finding.gap(log.inherited.doubt)
    return finding


def check_chain(log: RunLog) -> Finding:
    """Check that each version has one report and was trained from its predecessor's checkpoint."""
    finding = Finding(Promise.CHAIN, num_looked_at=len(log.steps))
    times = Counter(step.version for step in log.steps)
    for version, count in times.items():
        if count > 1:
            checkpoints = [step.report.checkpoint for step in log.steps if step.version == version]
            finding.broken("A version has several reports.", version=version, checkpoints=checkpoints)
    for before, after in pairwise(log.steps):
        if after.version > before.version + 1:
            finding.broken("Versions are missing between two reports.", version=after.version, predecessor=before.version)
        elif after.version <= before.version and times[after.version] == 1:
            finding.broken("A report stands behind a newer one.", version=after.version, newer=before.version)
        elif after.version == before.version + 1 and not _is_linked(log, before, after):
            finding.broken(
                "A step was not trained from its predecessor's checkpoint.",
                version=after.version,
                parent=after.report.parent,
                predecessor=before.report.checkpoint,
            )
    if log.steps:
        _check_first(finding, log)
    if number := log.unreadable.get("steps"):
        finding.gap(f"{number} messages on steps are no records")
    return finding


def check_requests(log: RunLog, samples: Samples) -> Finding:
    """Check that each request has one accepted answer: a group is one attempt, and of a correlation id at most one attempt was trained."""
    finding = Finding(Promise.REQUESTS, num_looked_at=len(log.issued))
    trained: set[tuple[int, str]] = set()
    for step in log.steps:
        _check_groups(finding, step)
        trained.update((int(step.seqs[np.argmax(step.groups == group)]), token) for group, token in enumerate(step.tokens))
    # Counted over all steps: a receipt that comes after its group was trained counts in the next step's report.
    taken = int(sum(step.report.metrics.get("replies_accepted", 0.0) for step in log.steps if step.is_sequential))
    if taken > len(log.correlations) and not any(log.lows.get("requests", {}).values()):
        finding.broken("More receipts were taken than requests wanted one.", receipts=taken, requests=len(log.correlations))
    answers: dict[str, set[tuple[int, str]]] = defaultdict(set)
    for reply in log.replies:
        seq = number_of(reply.group_id.rpartition("/")[2])
        if seq is not None:
            answers[reply.correlation].add((seq, reply.attempt))
    for correlation, given in answers.items():
        accepted = sorted(given & trained)
        if len(accepted) > 1:
            finding.broken("Two answers to one request were trained.", correlation=correlation, attempts=[token for _, token in accepted])
        if len({seq for seq, _ in given}) > 1:
            finding.broken(
                "One correlation id was answered for several seqs.", correlation=correlation, seqs=sorted({seq for seq, _ in given})
            )
    if unasked := len(answers.keys() - log.correlations):
        finding.note(f"{unasked} receipts answer requests that are no longer in the log, or never were")
    if why := unknown_samples(log):
        finding.gap(why)
    if samples.seqs.size and any(log.lows.get("replies", {}).values()):
        finding.note("retention has removed replies; what was trained of them is in the reports")
    return finding


def _versions_of_seqs(samples: Samples) -> dict[int, list[int]]:
    """The steps in which each seq was trained."""
    pairs = np.unique(np.stack([samples.seqs, samples.versions], axis=1), axis=0) if samples.seqs.size else np.zeros((0, 2), np.int64)
    found: dict[int, list[int]] = {}
    for seq, version in pairs.tolist():
        found.setdefault(seq, []).append(version)
    return found


def _check_floors(finding: Finding, log: RunLog, closed_seqs: Set[int]) -> None:
    """Check that each seq below `next_seq` of a manifest is trained or dropped, and that no newer manifest lowers `next_seq`."""
    known = [(offset, manifest) for offset, _, manifest in log.manifests if manifest.version <= log.tip]
    for (_, before), (_, after) in pairwise(known):
        if after.next_seq < before.next_seq and after.version >= before.version:
            finding.broken("The floor of the seqs went back.", version=after.version, floor=after.next_seq, before=before.next_seq)
    floor = max((manifest.next_seq for _, manifest in known), default=0)
    closed = np.zeros(floor, np.bool_)
    below = np.array([seq for seq in closed_seqs if seq < floor], np.int64)
    closed[below] = True
    lost = np.flatnonzero(~closed).tolist()
    if lost and (doubt := unknown_records(log)) is not None:
        finding.gap(f"{len(lost)} seqs below the floor {floor} have no state that is still in the log: {doubt}")
    elif lost:
        finding.broken(f"{len(lost)} seqs below the floor are neither trained nor dropped.", floor=floor, seqs=lost[:_NAMED])


def _is_linked(log: RunLog, before: Step, after: Step) -> bool:
    """Whether `after` was trained from `before`. Its parent is the checkpoint of `before`; or both steps share one checkpoint; or the
    parent is a checkpoint of the same version that a later session wrote, which it does when the other mode needs a snapshot that was not
    published."""
    parent = after.report.parent
    if parent == before.report.checkpoint:
        return True
    if after.report.checkpoint == before.report.checkpoint:
        return parent == before.report.parent
    version, _, session = (parent or "").partition("-")
    claimed = {claim.session for offset, claim in log.claims if offset < after.offset}
    return version == f"v{before.version}" and session in claimed


def _check_first(finding: Finding, log: RunLog) -> None:
    first, begun = log.steps[0], log.inherited.version
    if first.version == begun + 1:
        if not (first.report.parent or "").startswith(f"v{begun}-"):
            finding.broken(f"The first step was not trained from version {begun}.", version=first.version, parent=first.report.parent)
    elif log.lows["steps"].get(0):
        finding.gap(f"the reports before version {first.version} were removed by retention")
    else:
        finding.broken("The first report in the log is not of the first step.", version=first.version, parent=first.report.parent)


def _check_groups(finding: Finding, step: Step) -> None:
    """Check that each group of a step has one seq, and no index twice."""
    if not step.groups.size:
        return
    by_group = np.unique(np.stack([step.groups, step.seqs], axis=1), axis=0)
    if len(by_group) != len(step.tokens):
        finding.broken("A group of a step mixes seqs, or a seq has two groups.", version=step.version)
        return
    members = np.unique(np.stack([step.groups, step.indices], axis=1), axis=0)
    if len(members) != len(step.groups):
        finding.broken("A member of a group was taken twice.", version=step.version)
    if len(np.unique(by_group[:, 1])) != len(by_group):
        finding.broken("A seq has two groups in one step.", version=step.version)
