"""The feeder's rules by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from echo_core.closed_seqs import plan_resume
from echo_core.dispatch import may_issue
from echo_core.patience import Patience
from echo_core.policy import StalenessPolicy
from echo_rollout.open_seqs import Ledger, Lost, OpenRequests, OpenSeqs, dispatch_state
from echo_schemas.columns import pack_seqs
from echo_schemas.records import Progress


@given(floor=st.integers(0, 50), shown=st.sets(st.integers(0, 80)))
def test_resuming_skips_no_seq_and_repeats_none_that_is_shown(floor: int, shown: set[int]) -> None:
    resume = plan_resume(floor, shown)
    known = {seq for seq in shown if seq >= floor}
    assert not set(resume.missing) & shown
    assert set(resume.missing) | known == set(range(floor, resume.next_seq))
    assert all(seq < resume.next_seq for seq in known)
    assert resume.next_seq == max(known, default=floor - 1) + 1


@given(st.lists(st.integers(1, 3), min_size=1, max_size=30), st.data())
def test_markers_between_requests_never_count_as_work(gaps: list[int], data: st.DataObject) -> None:
    ledger, offsets, end = Ledger(1), [], 0
    for gap in gaps:
        offsets.append(end)
        assert ledger.written(0, end) == len(offsets) - 1
        end += gap
    done = data.draw(st.integers(0, len(offsets)))
    committed = offsets[done - 1] + 1 if done else 0
    assert ledger.finish_below(0, committed) == done
    assert ledger.finish_below(0, committed) == done
    assert ledger.num_written(0) == len(offsets)


def word(clock_s: float, *, next_seq: int = 0, closed: Iterable[int] = (), seen: Iterable[int] = (), **changes: Any) -> Progress:
    """The learner's word at a moment of its clock, at which it has read everything."""
    fields: dict[str, Any] = {"session": "s", "version": 0, "published": 0, "groups_trained": 0, "groups_dropped": 0, "read_s": clock_s}
    return Progress(
        run_id="demo",
        groups_ready=0,
        next_seq=next_seq,
        closed=pack_seqs(next_seq, closed),
        seen=pack_seqs(next_seq, seen),
        clock_s=clock_s,
        time_ms=0,
        **{**fields, **changes},
    )


def asked(*seqs: int, now_s: float = 0.0) -> OpenRequests:
    """Requests in the partition of their seq."""
    requests = OpenRequests(OpenSeqs())
    requests.hear(word(0.0))
    for seq in seqs:
        requests.issued(seq, seq, 0, now_s)
    return requests


def lost(requests: OpenRequests, now_s: float, patience_s: float | None = 100.0, *, alone: bool = False, **active_s: float) -> list[int]:
    """Seqs that are lost while workers hold the partitions `p0`, `p1`, … and finished something at these moments."""
    held = {int(name[1:]): since_s for name, since_s in active_s.items()}
    return [each.seq for each in requests.lost(now_s, patience_s, held, alone=alone)]


def test_what_waits_or_is_generated_or_waits_for_its_batch_is_never_lost() -> None:
    requests = asked(0, 1, 2)
    assert requests.finished(1, 1, 50.0) == [50.0]
    requests.finished(2, 1, 60.0)
    requests.hear(word(1e6, seen=(1,), closed=(2,)))
    assert lost(requests, 1e6, None, p0=0.0, p3=0.0) == []
    assert lost(requests, 1e6, p0=1e6 - 99, p3=0.0) == [], "its worker finishes one after the other"
    assert lost(requests, 1e6) == [], "nobody is there who could do it"
    assert lost(requests, 1e6, p0=0.0, alone=True) == [], "nobody else could do it"


def test_a_committed_request_is_lost_once_the_learner_has_read_on_and_seen_nothing_of_it() -> None:
    requests = asked(0, 1)
    requests.hear(word(100.0))
    requests.finished(0, 1, 5.0)
    requests.hear(word(109.0))
    assert lost(requests, 6.0, None) == []
    requests.hear(word(500.0, read_s=109.0))
    assert lost(requests, 7.0, None) == [], "it may lie among what the learner has not read"
    requests.hear(word(501.0, session="successor"))
    assert lost(requests, 7.0, None) == [], "another clock"
    requests.hear(word(520.0, session="successor"))
    assert lost(requests, 8.0, None) == [0]
    requests.issued(0, 3, 0, 8.0, resends=1)
    assert lost(requests, 8.0, None) == []
    requests.finished(3, 1, 9.0)
    requests.hear(word(540.0, session="successor"))
    assert requests.lost(9.0, None, {}) == [Lost(0, 1, "a worker has committed it, and no record of it came")]
    requests.hear(word(541.0, session="successor", next_seq=1))
    assert lost(requests, 9.0, None) == []


def test_a_request_that_no_living_worker_holds_is_lost_after_its_time() -> None:
    requests = asked(0, 1)
    assert lost(requests, 100.0, p1=50.0) == []
    assert lost(requests, 101.0, p1=50.0) == [0]
    assert lost(requests, 101.0, p1=50.0, alone=True) == [0]


def test_a_request_whose_worker_finishes_nothing_is_lost_after_its_time_if_there_are_others() -> None:
    requests = asked(0)
    assert lost(requests, 150.0, p0=60.0, p1=140.0) == []
    assert lost(requests, 161.0, p0=60.0, p1=140.0) == [0]


def test_undecided_are_the_seqs_in_the_log_that_are_not_closed_in_whatever_unit_a_parent_counted() -> None:
    """A fork from version 100, whose parent took 64 groups a step, and which takes 32."""
    seqs = OpenSeqs()
    seqs.hear(word(0.0, next_seq=6_400, closed=(6_402, 6_405), version=100, published=100, groups_trained=6_400))
    assert seqs.undecided == 0
    for seq in (6_400, 6_401, 6_402, 6_403):
        seqs.issued(seq)
    assert seqs.undecided == 3
    policy = StalenessPolicy(budget=3, publication_period=1, groups_per_step=32, group_size=2)
    progress = word(1.0, next_seq=6_401, closed=(6_402, 6_405), version=100, published=100)
    seqs.hear(progress)
    assert seqs.undecided == 2
    assert may_issue(dispatch_state(progress, 4 * 32 - 1), policy)
    assert not may_issue(dispatch_state(progress, 4 * 32), policy)


def test_an_older_learner_says_only_how_many_it_has_decided() -> None:
    seqs = OpenSeqs()
    for seq in range(12):
        seqs.issued(seq)
    assert seqs.undecided == 12
    seqs.hear(replace(word(0.0, next_seq=7, groups_trained=8, groups_dropped=1), closed=None, seen=None, clock_s=None, read_s=None))
    assert seqs.undecided == 3


def test_a_seq_far_above_all_others_was_issued_by_nobody() -> None:
    resume = plan_resume(5, {5, 7, 10**9, 10**12})
    assert (resume.missing, resume.next_seq) == ((6,), 8)


def test_a_time_limit_follows_what_was_measured_and_there_is_none_before() -> None:
    patience = Patience(least_s=600.0, num_steps=4)
    assert patience.limit_s(1_600.0) is None
    patience.finished(400.0)
    assert patience.limit_s(None) is None
    assert patience.limit_s(1.0) == 1_600.0
    assert patience.limit_s(1_600.0) == 12_800.0
    for _ in range(256):
        patience.finished(1.0)
    assert patience.limit_s(1.0) == 600.0
