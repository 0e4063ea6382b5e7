"""The feeder's rules by themselves."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo_rollout.feeder import Ledger, OpenSeqs, plan_resume, standing_of
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


def test_the_oldest_open_seq_is_lost_after_its_deadline_and_no_other() -> None:
    seqs = OpenSeqs()
    for seq in range(3):
        seqs.issued(seq, deadline_ms=100 + seq)
    assert seqs.lost(100) == ()
    assert seqs.lost(110) == (0,)
    seqs.issued(0, deadline_ms=120)
    seqs.decided_below(2)
    assert seqs.lost(102) == ()
    assert seqs.lost(103) == (2,)
    seqs.issued(0, 1)
    assert seqs.lost(102) == ()


def test_a_seq_that_stays_open_after_it_was_asked_again_may_wait_for_others_that_are_lost() -> None:
    seqs = OpenSeqs()
    for seq in range(4):
        seqs.issued(seq, deadline_ms=100 if seq < 3 else 500)
    assert seqs.lost(101) == (0,)
    seqs.issued(0, deadline_ms=200)
    assert seqs.lost(200) == ()
    assert seqs.lost(201) == (0, 1, 2)
    for seq in range(3):
        seqs.issued(seq, deadline_ms=300)
    assert seqs.lost(300) == ()
    seqs.decided_below(1)
    assert seqs.lost(301) == (1,)


def test_a_learner_that_has_decided_more_than_was_counted_leaves_nothing_undecided() -> None:
    progress = Progress(
        run_id="demo",
        session="s",
        version=2,
        published=2,
        groups_trained=8,
        groups_dropped=1,
        groups_ready=0,
        next_seq=9,
        time_ms=0,
    )
    assert standing_of(progress, 5).undecided == 0
    assert standing_of(progress, 12).undecided == 3
    assert standing_of(None, 4).undecided == 4
