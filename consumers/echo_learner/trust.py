"""Does each worker serve the version that it claims? Its log-probabilities on a sample, against that version's own, decide.

    reader thread ── first trajectory of (worker, version), and one more now and then ─▶ samples ── learner's thread ─▶ verdicts

No trajectory of a (worker, version) is trained before its first sample was compared, where that version's weights are at hand; one with
several versions in it makes a claim for each. One that disagrees is refused until a later sample agrees: a server that serves an older
adapter for a while recovers by itself. A claim that cannot be compared (weights no longer kept, or log-probabilities left to the learner,
which the settings must allow) is let through and counted. New names make nobody forget a conviction: convictions are kept apart, and a
claim that is forgotten is compared again before anything of it is trained. Whatever names other weights than those that were published
as its version is refused without comparing anything.

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
# (worker, version) pairs remembered, convicted ones apart: a thousand workers, as many versions as are remembered; some 20 MB.
_MOST_PAIRS = 65_536
# Claims of older versions are forgotten: they are above any budget.
_KEPT_VERSIONS = 64
# Samples that may wait for the learner. Whatever comes beyond them is compared when it is in a batch: names cost nothing to make.
_MOST_WAITING = 64
# Versions whose checksums are remembered: far more than any budget.
_MOST_VERSIONS = 4_096

Claim = tuple[str, int]
"""Worker and version."""


class Belief(StrEnum):
    """What comparing said of a claim."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    UNCHECKED = "unchecked"


@dataclass(slots=True)
class _Standing:
    """`verdict` None: a sample is on its way. `from_ms`: of trajectories started since. `sampled_s`: when the newest sample was taken."""

    sampled_s: float
    verdict: Belief | None = None
    from_ms: int = 0
    difference: float = 0.0


@dataclass(frozen=True, slots=True)
class Claimed:
    """Samples of one worker, with tokens that it claims to be of `version`."""

    version: int
    members: tuple[Trajectory, ...]

    @property
    def claim(self) -> Claim:
        """Whose, and of what."""
        return self.members[0].worker_id, self.version


class WorkerTrust:
    """The verdicts."""

    def __init__(self, metrics: LearnerMetrics, clock: Clock, *, tolerance: float) -> None:
        """`tolerance`: mean |difference| of log-probabilities a token, in nats, up to which a sample agrees."""
        self._metrics = metrics
        self._clock = clock
        self._tolerance = tolerance
        self._lock = threading.Lock()
        self._standings: OrderedDict[Claim, _Standing] = OrderedDict()
        # Whoever disagreed once.
        self._convicted: OrderedDict[Claim, _Standing] = OrderedDict()
        self._samples: list[Claimed] = []
        self._checksums: OrderedDict[int, str] = OrderedDict()

    def published(self, version: int, sha256: str) -> None:
        """`version` is in the log with these weights."""
        with self._lock:
            self._checksums[version] = sha256
            while len(self._checksums) > _MOST_VERSIONS:
                self._checksums.popitem(last=False)
            for standings in (self._standings, self._convicted):
                for claim in [claim for claim in standings if claim[1] < version - _KEPT_VERSIONS]:
                    del standings[claim]

    # The reader thread

    def wants(self, trajectory: Trajectory) -> bool:
        """Whether a claim of `trajectory` is to be looked at, for the first time or again, and there is room for its sample."""
        if trajectory.purpose is not Purpose.TRAIN or not is_comparable(trajectory):
            return False
        with self._lock:
            return len(self._samples) < _MOST_WAITING and any(self._is_due(claim, trajectory) for claim in _claims(trajectory))

    def offer(self, trajectory: Trajectory) -> None:
        """Take it as a sample of its claims that are to be looked at. Its tokens were found to be the model's."""
        with self._lock:
            self._offer(trajectory)

    # The learner's thread

    def take_samples(self) -> list[Claimed]:
        """Samples to compare."""
        with self._lock:
            found, self._samples = self._samples, []
        return found

    def judge(self, claimed: Claimed, difference: float | None) -> None:
        """The mean difference a token of what is claimed; None if it could not be compared."""
        worker, version = claim = claimed.claim
        verdict = Belief.UNCHECKED if difference is None else Belief.AGREES if difference <= self._tolerance else Belief.DISAGREES
        self._metrics.claims.labels(self._metrics.worker_label.of(worker), verdict.value).inc()
        with self._lock:
            standing = self._find(claim) or self._remember(claim)
            before = standing.verdict
            if verdict is Belief.UNCHECKED and before is not None:
                return
            if verdict is Belief.AGREES and before is Belief.DISAGREES:
                standing.from_ms = claimed.members[0].started_ms
            standing.verdict = verdict
            standing.difference = difference or 0.0
            if verdict is Belief.DISAGREES and self._standings.pop(claim, None) is not None:
                self._convicted[claim] = standing
                _shorten(self._convicted)
        if verdict is Belief.DISAGREES and before is not Belief.DISAGREES:
            logger.warning("%s What it claims so is dropped.", self._sentence(worker, version, standing.difference))
        elif before is Belief.DISAGREES and verdict is Belief.AGREES:
            logger.info("Worker %s serves version %d now", worker, version)

    def is_pending(self, trajectory: Trajectory) -> bool:
        """Whether a claim of it has to be compared before it is trained. One that was not offered, or is forgotten, is offered now."""
        if not is_comparable(trajectory):
            return False
        with self._lock:
            standings = [self._find(claim) for claim in _claims(trajectory)]
            if None in standings:
                self._offer(trajectory)
            return any(standing is None or standing.verdict is None for standing in standings)

    def fault_of(self, trajectory: Trajectory) -> tuple[DropReason, str] | None:
        """Why it is not believed, if so."""
        with self._lock:
            checksum = self._checksums.get(trajectory.max_version)
            if not trajectory.is_exempt and checksum is not None and trajectory.weights_sha256 != checksum:
                named = f"the weights {trajectory.weights_sha256[:12]} as version {trajectory.max_version}"
                return DropReason.WRONG_VERSION, f"Worker {trajectory.worker_id} names {named}, which was published as {checksum[:12]}."
            for worker, version in _claims(trajectory):
                standing = self._convicted.get((worker, version))
                if standing is not None and (standing.verdict is Belief.DISAGREES or trajectory.started_ms < standing.from_ms):
                    return DropReason.WRONG_VERSION, self._sentence(worker, version, standing.difference)
        return None

    # Inside, lock held

    def _find(self, claim: Claim) -> _Standing | None:
        return self._convicted.get(claim) or self._standings.get(claim)

    def _remember(self, claim: Claim) -> _Standing:
        standing = self._standings[claim] = _Standing(sampled_s=self._clock.monotonic_s())
        _shorten(self._standings)
        return standing

    def _is_due(self, claim: Claim, trajectory: Trajectory) -> bool:
        standing = self._find(claim)
        if standing is None:
            return True
        is_due = self._clock.monotonic_s() - standing.sampled_s >= _AGAIN_S
        return standing.verdict is not None and is_due and trajectory.started_ms >= standing.from_ms

    def _offer(self, trajectory: Trajectory) -> None:
        for claim in _claims(trajectory):
            if self._is_due(claim, trajectory):
                (self._find(claim) or self._remember(claim)).sampled_s = self._clock.monotonic_s()
                self._samples.append(Claimed(claim[1], (trajectory,)))

    def _sentence(self, worker: str, version: int, difference: float) -> str:
        return (
            f"Worker {worker} claims version {version}, and its log-probabilities differ from that version's by {difference:.2g} nats a "
            f"token (up to {self._tolerance:g} is believed)."
        )


def is_comparable(trajectory: Trajectory) -> bool:
    """Whether its sampler said how likely its tokens were."""
    return trajectory.logprob_source is LogprobSource.SAMPLER


def _claims(trajectory: Trajectory) -> tuple[Claim, ...]:
    """Nearly always one."""
    return tuple((trajectory.worker_id, version) for version in sorted({span.version for span in trajectory.version_spans}))


def _shorten(standings: OrderedDict[Claim, _Standing]) -> None:
    while len(standings) > _MOST_PAIRS:
        standings.popitem(last=False)
