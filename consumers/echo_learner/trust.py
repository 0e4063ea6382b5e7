"""Does each worker serve the version that it claims? Its log-probabilities on a sample, against that version's own, decide.

    reader thread ── first trajectory of (worker, version), and one more now and then ─▶ samples ── learner's thread ─▶ verdicts

No trajectory of a (worker, version) is trained before its first sample was compared, where that version's weights are at hand. One that
disagrees is refused until a later sample agrees: a server that serves an older adapter for a while recovers by itself. A claim that cannot
be compared (weights no longer kept, several versions in one answer, log-probabilities left to the learner) is let through and counted.
Whatever names other weights than those that were published as its version is refused without comparing anything.

Threads: the reader thread offers, the publication thread says what was published, the learner's thread does the rest; one lock guards the
verdicts. Nothing blocks.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from echo_bus.clock import Clock
from echo_learner.metrics import LearnerMetrics
from echo_schemas.records import DropReason, LogprobSource, Purpose, Trajectory

logger = logging.getLogger(__name__)

# A sample costs one forward pass; a server that changes its mind between two of them is found out by the next.
_AGAIN_S = 10.0
# (worker, version) pairs remembered: a hundred workers, forty versions.
_MOST_PAIRS = 4_096
# Versions whose checksums are remembered: far more than any budget.
_MOST_VERSIONS = 4_096

Claim = tuple[str, int]
"""Worker and version."""


class Verdict(StrEnum):
    """What comparing said of a claim."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    UNCHECKED = "unchecked"


@dataclass(slots=True)
class _Standing:
    """`verdict` None: a sample is on its way. `from_ms`: of trajectories started since. `sampled_s`: when the newest sample was taken."""

    sampled_s: float
    verdict: Verdict | None = None
    from_ms: int = 0
    difference: float = 0.0


class WorkerTrust:
    """The verdicts."""

    def __init__(self, metrics: LearnerMetrics, clock: Clock, *, tolerance: float) -> None:
        """`tolerance`: mean |difference| of log-probabilities a token, in nats, up to which a sample agrees."""
        self._metrics = metrics
        self._clock = clock
        self._tolerance = tolerance
        self._lock = threading.Lock()
        self._standings: OrderedDict[Claim, _Standing] = OrderedDict()
        self._samples: list[Trajectory] = []
        self._checksums: OrderedDict[int, str] = OrderedDict()

    def published(self, version: int, sha256: str) -> None:
        """`version` is in the log with these weights."""
        with self._lock:
            self._checksums[version] = sha256
            while len(self._checksums) > _MOST_VERSIONS:
                self._checksums.popitem(last=False)

    # The reader thread

    def wants(self, trajectory: Trajectory) -> bool:
        """Whether `trajectory` would be the first sample of its claim, or one that is due again."""
        if trajectory.purpose is not Purpose.TRAIN or not is_comparable(trajectory):
            return False
        standing = self._standings.get(_claim(trajectory))
        if standing is None:
            return True
        is_due = self._clock.monotonic_s() - standing.sampled_s >= _AGAIN_S
        return standing.verdict is not None and is_due and trajectory.started_ms >= standing.from_ms

    def offer(self, trajectory: Trajectory) -> None:
        """Take it as a sample. Its tokens were found to be the model's."""
        now_s = self._clock.monotonic_s()
        with self._lock:
            standing = self._standings.setdefault(_claim(trajectory), _Standing(sampled_s=now_s))
            standing.sampled_s = now_s
            self._samples.append(trajectory)
            while len(self._standings) > _MOST_PAIRS:
                self._standings.popitem(last=False)

    # The learner's thread

    def take_samples(self) -> list[tuple[Trajectory, ...]]:
        """Samples to compare, as groups of one."""
        with self._lock:
            found, self._samples = self._samples, []
        return [(sample,) for sample in found]

    def judge(self, group: tuple[Trajectory, ...], difference: float | None) -> None:
        """The mean difference a token of a group of one worker and version; None if it could not be compared."""
        first = group[0]
        worker, version = claim = _claim(first)
        verdict = Verdict.UNCHECKED if difference is None else Verdict.AGREES if difference <= self._tolerance else Verdict.DISAGREES
        self._metrics.claims.labels(self._metrics.worker_label.of(worker), verdict.value).inc()
        with self._lock:
            standing = self._standings.setdefault(claim, _Standing(sampled_s=self._clock.monotonic_s()))
            before = standing.verdict
            if verdict is Verdict.UNCHECKED and before is not None:
                return
            if verdict is Verdict.AGREES and before is Verdict.DISAGREES:
                standing.from_ms = first.started_ms
            standing.verdict = verdict
            standing.difference = difference or 0.0
        if verdict is Verdict.DISAGREES and before is not Verdict.DISAGREES:
            logger.warning("%s What it claims so is dropped.", self._sentence(worker, version, standing.difference))
        elif before is Verdict.DISAGREES and verdict is Verdict.AGREES:
            logger.info("Worker %s serves version %d now", worker, version)

    def is_pending(self, trajectory: Trajectory) -> bool:
        """Whether the first sample of its claim waits to be compared."""
        standing = self._standings.get(_claim(trajectory))
        return standing is not None and standing.verdict is None

    def fault_of(self, trajectory: Trajectory) -> tuple[DropReason, str] | None:
        """Why it is not believed, if so."""
        checksum = self._checksums.get(trajectory.max_version)
        if not trajectory.is_exempt and checksum is not None and trajectory.weights_sha256 != checksum:
            named = f"the weights {trajectory.weights_sha256[:12]} as version {trajectory.max_version}"
            return DropReason.WRONG_VERSION, f"Worker {trajectory.worker_id} names {named}, which was published as {checksum[:12]}."
        for version in {trajectory.min_version, trajectory.max_version}:
            standing = self._standings.get((trajectory.worker_id, version))
            if standing is None:
                continue
            if standing.verdict is Verdict.DISAGREES or trajectory.started_ms < standing.from_ms:
                return DropReason.WRONG_VERSION, self._sentence(trajectory.worker_id, version, standing.difference)
        return None

    def _sentence(self, worker: str, version: int, difference: float) -> str:
        return (
            f"Worker {worker} claims version {version}, and its log-probabilities differ from that version's by {difference:.2g} nats a "
            f"token (up to {self._tolerance:g} is believed)."
        )


def is_comparable(trajectory: Trajectory) -> bool:
    """Whether one version is claimed for all of it, by log-probabilities of the sampler's own."""
    return trajectory.logprob_source is LogprobSource.SAMPLER and trajectory.min_version == trajectory.max_version


def _claim(trajectory: Trajectory) -> Claim:
    return trajectory.worker_id, trajectory.min_version
