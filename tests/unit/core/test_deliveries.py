"""What workers say they make against what the learner has read of them."""

from __future__ import annotations

from echo_core.capacity.deliveries import Deliveries
from echo_schemas.records import WorkerShare, WorkerState, WorkerStatus

GROUP = 2


def word(name: str, rate: float, busy_s: float) -> WorkerStatus:
    return WorkerStatus(
        run_id="r", worker_id=name, host="h", engine="e", state=WorkerState.READY, rollouts_per_s=rate, busy_s=busy_s, time_ms=0
    )  # fmt: skip


def played(*workers: tuple[str, float, int], reports: int = 5, since_s: float = 0.0, has_waited: bool = True) -> Deliveries:
    """Each of (name, claimed rate, delivered in a report) is always busy; a report every 10 s."""
    deliveries = Deliveries(group_size=GROUP)
    for name, rate, _ in workers:
        deliveries.heard(word(name, rate, since_s))
    for number in range(1, reports + 1):
        for name, rate, _ in workers:
            deliveries.heard(word(name, rate, since_s + 10.0 * number))
        deliveries.reported((WorkerShare(worker_id=name, delivered=count) for name, _, count in workers), has_waited=has_waited)
    return deliveries


def test_whoever_delivers_a_tenth_of_its_claim_is_found_and_counts_with_it() -> None:
    found = played(("honest", 10.0, 95), ("liar", 100.0, 100)).believed_shares()
    assert list(found) == ["liar"]
    assert abs(found["liar"] - 0.1 / 0.95) < 1e-9


def test_alone_a_worker_is_measured_by_its_own_claim() -> None:
    assert list(played(("liar", 100.0, 100)).believed_shares()) == ["liar"]
    assert not played(("honest", 10.0, 60)).believed_shares()


def test_alone_and_with_a_learner_that_does_not_wait_a_worker_may_have_delivered_what_lies_in_the_log() -> None:
    assert not played(("fast", 100.0, 100), has_waited=False).believed_shares()


def test_a_learner_that_reads_little_of_everybody_accuses_nobody() -> None:
    assert not played(("a", 10.0, 20), ("b", 20.0, 40)).believed_shares()


def test_four_reports_are_too_few() -> None:
    assert not played(("liar", 100.0, 1), reports=4).believed_shares()


def test_a_claim_of_few_groups_tells_nothing() -> None:
    assert not played(("slow", 0.1, 0), ("fast", 10.0, 100)).believed_shares()


def test_a_worker_that_mends_its_ways_is_believed_after_five_reports() -> None:
    deliveries = played(("liar", 100.0, 100), ("honest", 10.0, 100))
    assert deliveries.believed_shares()
    for number in range(6, 11):
        deliveries.heard(word("liar", 10.0, 10.0 * number))
        deliveries.heard(word("honest", 10.0, 10.0 * number))
        deliveries.reported((WorkerShare(worker_id="liar", delivered=100), WorkerShare(worker_id="honest", delivered=100)), has_waited=True)
    assert not deliveries.believed_shares()


def test_a_restart_counts_busy_time_from_zero() -> None:
    deliveries = played(("w", 10.0, 100), since_s=1000.0)
    deliveries.heard(word("w", 10.0, 5.0))
    deliveries.reported((WorkerShare(worker_id="w", delivered=50),), has_waited=True)
    assert not deliveries.believed_shares()


def test_numbers_that_are_none_are_passed_over() -> None:
    assert not played(("odd", float("inf"), 1), ("odder", float("nan"), 1)).believed_shares()


def test_a_learner_that_does_not_say_what_was_delivered_accuses_nobody() -> None:
    assert not played(("w", 10.0, 0)).believed_shares()
