"""Whether each worker serves the version that it claims: its log-probabilities of a sample are compared with that version's own.

    reader thread ── first trajectory of (worker, version), and one more now and then ─▶ samples ── learner's thread ─▶ verdicts

A claim is a (worker, version). A trajectory with tokens of several versions makes several claims. No trajectory of a claim is trained
before its first sample was compared, if that version's weights are kept. After a sample that disagrees the claim's trajectories are refused
until a later sample agrees, so a server that serves an older adapter for a while recovers. A claim that cannot be compared (the weights are
no longer kept, or the learner computes the log-probabilities, which the settings must allow) is accepted and counted. Convictions are
kept apart from other claims, so new worker names cannot push them out; a forgotten claim is compared again before it is trained.
A trajectory with another checksum than that of the published version is refused without a comparison.

Threads: the reader thread offers samples, the publication thread reports versions, the learner's thread does the rest; one lock guards the
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

# Seconds between two samples of a claim. A sample costs one forward pass; a server that changes its weights is noticed at the next sample.
_AGAIN_S = 10.0
# Claims remembered, and as many convicted ones: a thousand workers with `_KEPT_VERSIONS` versions each; some 20 MB.
_MOST_PAIRS = 65_536
# Claims of older versions are forgotten: their staleness is above any budget.
_KEPT_VERSIONS = 64
# Samples that may wait for the learner. A claim beyond them is compared when it is in a batch, since a hostile worker can invent names.
_MOST_WAITING = 64
# Probe groups that wait to be compared; older ones are forgotten.
_MAX_PROBES = 16
# Versions whose checksums are remembered: far more than any budget.
_MOST_VERSIONS = 4_096

Claim = tuple[str, int]
"""Worker and version."""


class ClaimCheck(StrEnum):
    """The result of comparing a claim."""

    AGREES = "agrees"
    DISAGREES = "disagrees"
    UNCHECKED = "unchecked"


@dataclass(slots=True)
class _CheckState:
    """`verdict` None: a sample waits to be compared. `from_ms`: the verdict holds for trajectories started since. `sampled_s`: when the
    newest sample was taken."""

    sampled_s: float
    verdict: ClaimCheck | None = None
    from_ms: int = 0
    difference: float = 0.0


@dataclass(frozen=True, slots=True)
class Claimed:
    """Samples of one worker with tokens that are tagged with `version`."""

    version: int
    members: tuple[Trajectory, ...]

    @property
    def claim(self) -> Claim:
        """Worker and version."""
        return self.members[0].worker_id, self.version


class WorkerTrust:
    def __init__(self, metrics: LearnerMetrics, clock: Clock, *, tolerance: float) -> None:
        """`tolerance`: mean |difference| of log-probabilities a token, in nats, up to which a sample agrees."""
        self._metrics = metrics
        self._clock = clock
        self._tolerance = tolerance
        self._lock = threading.RLock()
        self._states: OrderedDict[Claim, _CheckState] = OrderedDict()
        # Claims that disagreed once.
        self._convicted: OrderedDict[Claim, _CheckState] = OrderedDict()
        self._samples: list[Claimed] = []
        self._probes: OrderedDict[tuple[str, int, str], list[Trajectory]] = OrderedDict()
        self._whole_probes: list[Claimed] = []
        self._checksums: OrderedDict[int, str] = OrderedDict()

    def published(self, version: int, sha256: str) -> None:
        """Note that `version` is in the log with these weights."""
        with self._lock:
            self._checksums[version] = sha256
            while len(self._checksums) > _MOST_VERSIONS:
                self._checksums.popitem(last=False)
            for states in (self._states, self._convicted):
                for claim in [claim for claim in states if claim[1] < version - _KEPT_VERSIONS]:
                    del states[claim]

    # The reader thread

    def wants(self, trajectory: Trajectory) -> bool:
        """Whether a claim of `trajectory` is due for a comparison, the first or a later one, and there is room for its sample."""
        if trajectory.purpose is not Purpose.TRAIN or not is_comparable(trajectory):
            return False
        with self._lock:
            return len(self._samples) < _MOST_WAITING and any(self._is_due(claim, trajectory) for claim in _claims(trajectory))

    def offer(self, trajectory: Trajectory) -> None:
        """Take it as a sample of its claims that are due. The caller has checked its tokens against the model."""
        with self._lock:
            for claim in _claims(trajectory):
                if self._is_due(claim, trajectory):
                    (self._find(claim) or self._remember(claim)).sampled_s = self._clock.monotonic_s()
                    self._samples.append(Claimed(claim[1], (trajectory,)))

    def offer_probe(self, trajectory: Trajectory) -> None:
        """Take it into its probe group, which is a sample when it is whole. The caller has checked its tokens against the model."""
        key = (trajectory.worker_id, trajectory.seq, trajectory.attempt)
        with self._lock:
            members = self._probes.setdefault(key, [])
            members.append(trajectory)
            if len(members) == trajectory.group_size:
                self._whole_probes.append(Claimed(trajectory.min_version, tuple(self._probes.pop(key))))
                del self._whole_probes[:-_MAX_PROBES]
            while len(self._probes) > _MAX_PROBES:
                self._probes.popitem(last=False)

    # The learner's thread

    def take_samples(self) -> list[Claimed]:
        """Probe groups that are whole, oldest first, and samples of claims."""
        with self._lock:
            found = self._whole_probes + self._samples
            self._whole_probes, self._samples = [], []
        return found

    def judge(self, claimed: Claimed, difference: float | None) -> None:
        """Note the mean difference a token of a claim's samples; None if they could not be compared."""
        worker, version = claim = claimed.claim
        verdict = (
            ClaimCheck.UNCHECKED if difference is None else ClaimCheck.AGREES if difference <= self._tolerance else ClaimCheck.DISAGREES
        )
        self._metrics.claims.labels(self._metrics.worker_label.of(worker), verdict.value).inc()
        with self._lock:
            state = self._find(claim) or self._remember(claim)
            before = state.verdict
            if verdict is ClaimCheck.UNCHECKED and before is not None:
                return
            if verdict is ClaimCheck.AGREES and before is ClaimCheck.DISAGREES:
                state.from_ms = claimed.members[0].started_ms
            state.verdict = verdict
            state.difference = difference or 0.0
            if verdict is ClaimCheck.DISAGREES and self._states.pop(claim, None) is not None:
                self._convicted[claim] = state
                _shorten(self._convicted)
        if verdict is ClaimCheck.DISAGREES and before is not ClaimCheck.DISAGREES:
            logger.warning("%s Its samples of that version are dropped.", self._sentence(worker, version, state.difference))
        elif before is ClaimCheck.DISAGREES and verdict is ClaimCheck.AGREES:
            logger.info("Worker %s serves version %d now", worker, version)

    def is_pending(self, trajectory: Trajectory) -> bool:
        """Whether a claim of it must be compared before it is trained. A claim that is not known is offered now."""
        if not is_comparable(trajectory):
            return False
        with self._lock:
            states = [self._find(claim) for claim in _claims(trajectory)]
            if None in states:
                self.offer(trajectory)
            return any(state is None or state.verdict is None for state in states)

    def fault_of(self, trajectory: Trajectory) -> tuple[DropReason, str] | None:
        """Why the trajectory is refused, if it is."""
        with self._lock:
            checksum = self._checksums.get(trajectory.max_version)
            if not trajectory.is_exempt and checksum is not None and trajectory.weights_sha256 != checksum:
                named = f"the weights {trajectory.weights_sha256[:12]} as version {trajectory.max_version}"
                return DropReason.WRONG_VERSION, f"Worker {trajectory.worker_id} names {named}, which was published as {checksum[:12]}."
            for worker, version in _claims(trajectory):
                state = self._convicted.get((worker, version))
                if state is not None and (state.verdict is ClaimCheck.DISAGREES or trajectory.started_ms < state.from_ms):
                    return DropReason.WRONG_VERSION, self._sentence(worker, version, state.difference)
        return None

    # Private; the caller holds the lock

    def _find(self, claim: Claim) -> _CheckState | None:
        return self._convicted.get(claim) or self._states.get(claim)

    def _remember(self, claim: Claim) -> _CheckState:
        state = self._states[claim] = _CheckState(sampled_s=self._clock.monotonic_s())
        _shorten(self._states)
        return state

    def _is_due(self, claim: Claim, trajectory: Trajectory) -> bool:
        state = self._find(claim)
        if state is None:
            return True
        is_due = self._clock.monotonic_s() - state.sampled_s >= _AGAIN_S
        return state.verdict is not None and is_due and trajectory.started_ms >= state.from_ms

    def _sentence(self, worker: str, version: int, difference: float) -> str:
        return (
            f"Worker {worker} claims version {version}, and its log-probabilities differ from that version's by {difference:.2g} nats a "
            f"token (up to {self._tolerance:g} is believed)."
        )


def is_comparable(trajectory: Trajectory) -> bool:
    """Whether it has log-probabilities of its sampler."""
    return trajectory.logprob_source is LogprobSource.SAMPLER


def _claims(trajectory: Trajectory) -> tuple[Claim, ...]:
    if trajectory.min_version == trajectory.max_version:
        return ((trajectory.worker_id, trajectory.min_version),)
    return tuple((trajectory.worker_id, version) for version in sorted({span.version for span in trajectory.version_spans}))


def _shorten(states: OrderedDict[Claim, _CheckState]) -> None:
    while len(states) > _MOST_PAIRS:
        states.popitem(last=False)
