"""Claims of versions: who is compared when, what is refused until when, and who is named."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from echo_learner import trust as module
from echo_learner.metrics import LearnerMetrics
from echo_learner.trust import Claimed, WorkerTrust
from echo_schemas.records import DropReason, LogprobSource, Purpose, Trajectory, VersionSpan
from tests.unit.core.records import trajectory

TOLERANCE = 0.01


@dataclass
class ManualClock:
    """Time that a test moves."""

    now_s: float = 100.0

    def monotonic_s(self) -> float:
        return self.now_s

    def time_ms(self) -> int:
        return int(self.now_s * 1000)


@dataclass
class Case:
    """A trust, its clock, and the reader's and learner's parts in one call each."""

    clock: ManualClock = field(default_factory=ManualClock)
    metrics: LearnerMetrics = field(default_factory=LearnerMetrics)
    trust: WorkerTrust = field(init=False)

    def __post_init__(self) -> None:
        self.trust = WorkerTrust(self.metrics, self.clock, tolerance=TOLERANCE)

    def read(self, record: Trajectory) -> bool:
        """Whether it became a sample."""
        if wanted := self.trust.wants(record):
            self.trust.offer(record)
        return wanted

    def judge(self, difference: float | None) -> int:
        """All samples get the same answer; how many there were."""
        samples = self.trust.take_samples()
        for sample in samples:
            self.trust.judge(sample, difference)
        return len(samples)

    def counted(self, worker: str, verdict: str) -> float:
        return self.metrics.registry.get_sample_value("echo_learner_claims_total", {"worker": worker, "verdict": verdict}) or 0.0


def made_by(worker: str, version: int, *, seq: int = 0, started_ms: int = 10) -> Trajectory:
    return trajectory(seq, version=version, worker_id=worker, started_ms=started_ms)


def test_one_sample_of_each_worker_and_version_is_looked_at() -> None:
    case = Case()
    assert case.read(made_by("a", 1))
    assert not case.read(made_by("a", 1, seq=1))
    assert case.read(made_by("a", 2))
    assert case.read(made_by("b", 1))
    assert case.trust.is_pending(made_by("a", 1, seq=2))
    assert case.judge(0.0) == 3
    assert not case.trust.is_pending(made_by("a", 1, seq=2))
    assert case.trust.fault_of(made_by("a", 1)) is None
    assert case.counted("a", "agrees") == 2


def test_who_disagrees_is_refused_and_named_and_nobody_else() -> None:
    case = Case()
    case.read(made_by("liar", 3))
    case.judge(0.5)
    fault = case.trust.fault_of(made_by("liar", 3, seq=9))
    assert fault is not None
    assert fault[0] is DropReason.WRONG_VERSION
    assert "Worker liar claims version 3" in fault[1]
    assert "0.5 nats" in fault[1]
    assert case.trust.fault_of(made_by("honest", 3)) is None
    assert case.trust.fault_of(made_by("liar", 4)) is None, "each version is looked at anew"
    assert case.counted("liar", "disagrees") == 1


def test_who_names_other_weights_than_the_published_ones_is_refused_however_likely_its_tokens_are() -> None:
    case = Case()
    case.read(made_by("w", 3))
    case.judge(0.0)
    record = made_by("w", 3, seq=1)
    assert case.trust.fault_of(record) is None, "nothing is known of version 3"
    case.trust.published(3, record.weights_sha256)
    assert case.trust.fault_of(record) is None
    case.trust.published(3, "1" * 64)
    fault = case.trust.fault_of(record)
    assert fault is not None
    assert fault[0] is DropReason.WRONG_VERSION
    assert "as version 3, which was published as 111111111111" in fault[1]


def test_a_worker_that_agrees_again_is_believed_from_then_on_only() -> None:
    case = Case()
    case.read(made_by("w", 1, started_ms=10))
    case.judge(0.5)
    assert not case.read(made_by("w", 1, started_ms=20)), "not again at once"
    case.clock.now_s += module._AGAIN_S
    assert case.read(made_by("w", 1, started_ms=30))
    assert not case.trust.is_pending(made_by("w", 1)), "it is refused meanwhile, not waited for"
    assert case.trust.fault_of(made_by("w", 1, started_ms=30)) is not None
    case.judge(0.001)
    assert case.trust.fault_of(made_by("w", 1, started_ms=30)) is None
    assert case.trust.fault_of(made_by("w", 1, started_ms=29)) is not None, "it was made while the worker did not serve it"


def test_a_worker_that_agreed_is_looked_at_again_while_its_claim_lasts() -> None:
    case = Case()
    case.read(made_by("w", 1))
    case.judge(0.0)
    case.clock.now_s += module._AGAIN_S
    assert case.read(made_by("w", 1))
    case.judge(0.5)
    assert case.trust.fault_of(made_by("w", 1)) is not None


def test_what_cannot_be_compared_is_let_through_and_counted() -> None:
    case = Case()
    for record in (
        trajectory(logprob_source=LogprobSource.RECOMPUTED),
        trajectory(purpose=Purpose.EVAL),
        trajectory(purpose=Purpose.PROBE),
    ):
        assert not case.read(record)
    assert not case.trust.is_pending(trajectory(logprob_source=LogprobSource.RECOMPUTED))
    case.read(made_by("w", 7))
    case.judge(None)
    assert case.trust.fault_of(made_by("w", 7)) is None
    assert case.counted("w", "unchecked") == 1
    case.trust.judge(Claimed(8, (made_by("w", 8),)), 0.5)
    case.trust.judge(Claimed(8, (made_by("w", 8),)), None)
    assert case.trust.fault_of(made_by("w", 8)) is not None, "not having compared does not clear a name"


def test_an_answer_of_two_versions_claims_both_and_is_refused_if_either_is_false() -> None:
    case = Case()
    mixed = trajectory(
        version_spans=(VersionSpan(start=1, end=2, version=1), VersionSpan(start=2, end=3, version=2)),
        min_version=1,
        max_version=2,
        worker_id="w",
    )
    assert case.read(mixed)
    samples = case.trust.take_samples()
    assert [sample.claim for sample in samples] == [("w", 1), ("w", 2)]
    case.trust.judge(samples[1], 0.0)
    assert case.trust.is_pending(mixed)
    case.trust.judge(samples[0], 0.5)
    assert case.trust.fault_of(mixed) is not None
    assert case.trust.fault_of(made_by("w", 2)) is None


def test_a_probe_group_speaks_for_its_worker_too() -> None:
    case = Case()
    case.trust.judge(Claimed(1, (made_by("w", 1), made_by("w", 1, seq=1))), 0.5)
    assert case.trust.fault_of(made_by("w", 1)) is not None


def test_new_names_make_nobody_forget_a_conviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PAIRS", 4)
    case = Case()
    case.read(made_by("liar", 0))
    case.judge(0.5)
    for number in range(20):
        case.read(made_by(f"name-{number}", 0))
        case.judge(0.0)
    assert case.trust.fault_of(made_by("liar", 0)) is not None


def test_a_claim_that_was_forgotten_is_compared_again_before_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_PAIRS", 1)
    case = Case()
    case.read(made_by("a", 0))
    case.read(made_by("b", 0))
    assert case.judge(0.0) == 2
    assert case.trust.is_pending(made_by("a", 0)), "nothing is known of it any more"
    assert case.judge(0.5) == 1, "so it was offered"
    assert case.trust.fault_of(made_by("a", 0)) is not None


def test_names_that_are_made_up_cost_no_more_samples_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 3)
    case = Case()
    assert sum(case.read(made_by(f"name-{number}", 0)) for number in range(20)) == 3
    assert case.judge(0.0) == 3
    assert case.trust.is_pending(made_by("name-9", 0)), "it is compared when it is in a batch"
    assert case.judge(0.0) == 1
    assert not case.trust.is_pending(made_by("name-9", 0))


def test_claims_of_versions_above_any_budget_are_forgotten() -> None:
    case = Case()
    case.read(made_by("w", 0))
    case.judge(0.5)
    case.trust.published(module._KEPT_VERSIONS, "")
    assert case.trust.fault_of(made_by("w", 0)) is not None
    case.trust.published(module._KEPT_VERSIONS + 1, "")
    assert case.trust.is_pending(made_by("w", 0))
