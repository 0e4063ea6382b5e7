"""The ledger of requests: batches fill, answers count once, resends end, whatever comes in whatever order."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from echo_core.groups import SeqState
from echo_learner.sequential.requesting import Ask, Closing, ReplyFate, RequestLedger
from echo_schemas.records import Coordinates, DropReason, ReplyOutcome, RolloutReply

SHA = "a" * 64
GROUP_SIZE = 2
PLACES = (Coordinates(partition=0, offset=1), Coordinates(partition=0, offset=2))


def ledger(num_groups: int = 2, max_resends: int = 1, **fields: Any) -> RequestLedger:
    made = RequestLedger(
        num_groups=num_groups, group_size=GROUP_SIZE, max_resends=max_resends, session="s", **{"next_seq": 0, **fields}
    )  # fmt: skip
    made.begin(4, SHA)
    return made


def send_all(requests: RequestLedger, now_ms: int = 0, patience_s: float | None = 1.0) -> list[Ask]:
    asks = []
    while (ask := requests.next_wanted(now_ms, patience_s)) is not None:
        requests.sent(ask)
        asks.append(ask)
    return asks


def expire(requests: RequestLedger, now_ms: int, patience_s: float | None = None) -> list[Closing]:
    return requests.expire(now_ms, patience_s, least_s=1.0)


def reply(ask: Ask, outcome: ReplyOutcome = ReplyOutcome.DONE, **changes: Any) -> RolloutReply:
    fields: dict[str, Any] = {
        "correlation": ask.correlation,
        "outcome": outcome,
        "version": 4,
        "weights_sha256": SHA,
        "where": PLACES if outcome is ReplyOutcome.DONE else (),
        "error": None,
    }
    return RolloutReply(run_id="demo", group_id=f"demo/{ask.seq}", attempt="a", worker_id="w", time_ms=1, **{**fields, **changes})


def test_a_step_wants_exactly_its_groups_and_the_next_one_other_seqs() -> None:
    requests = ledger(3)
    asks = send_all(requests)
    assert [ask.seq for ask in asks] == [0, 1, 2]
    assert len({ask.correlation for ask in asks}) == 3
    assert requests.num_wanted == 0
    requests.trained([0, 1, 2])
    requests.begin(5, "b" * 64)
    assert [ask.seq for ask in send_all(requests)] == [3, 4, 5]


def test_seqs_that_were_lost_are_asked_before_new_ones() -> None:
    assert [ask.seq for ask in send_all(ledger(3, next_seq=9, again=(7, 5)))] == [5, 7, 9]


def test_what_a_step_left_untrained_is_asked_for_under_the_next_version() -> None:
    requests = ledger(2)
    before = send_all(requests)
    requests.trained([1])
    requests.begin(5, "b" * 64)
    after = send_all(requests)
    assert [ask.seq for ask in after] == [0, 2]
    assert after[0].correlation != before[0].correlation
    assert requests.take(before[0].correlation, reply(before[0])).fate is ReplyFate.LATE


def test_a_request_of_an_earlier_session_is_waited_for_and_not_sent() -> None:
    requests = RequestLedger(num_groups=2, group_size=GROUP_SIZE, max_resends=1, session="new", next_seq=4)
    requests.adopt(Ask(seq=5, correlation="old-5", sent_ms=0, resends=1))
    requests.begin(4, SHA)
    (own,) = send_all(requests)
    assert own.seq == 6
    assert requests.take("old-5", reply(Ask(seq=5, correlation="old-5", sent_ms=0))).fate is ReplyFate.ACCEPTED


def test_a_receipt_whose_group_never_shows_is_asked_again_a_while_after_it() -> None:
    requests = ledger(1)
    (ask,) = send_all(requests)
    assert expire(requests, 10**9) == []
    assert requests.take(ask.correlation, reply(ask)).fate is ReplyFate.ACCEPTED
    assert expire(requests, 10**9) == []
    assert expire(requests, 10**9 + 1000) == []
    assert expire(requests, 10**9 + 1001) == []
    (again,) = send_all(requests, 10**9 + 1001)
    assert (again.seq, again.resends) == (0, 1)
    requests.take(again.correlation, reply(again))
    expire(requests, 2 * 10**9)
    (closing,) = expire(requests, 2 * 10**9 + 1001)
    assert (closing.seq, closing.why) == (0, DropReason.LOST)


def test_a_generation_of_an_hour_is_neither_sent_again_nor_given_up() -> None:
    requests = ledger(2, max_resends=0)
    first, second = send_all(requests, patience_s=None)
    assert (first.deadline_ms, second.deadline_ms) == (None, None)
    assert expire(requests, 3_600_000, None) == []
    assert requests.num_wanted == 0
    took_s = requests.look(0, SeqState.WHOLE, 3_600_000)
    assert took_s == 3_600.0
    assert requests.look(0, SeqState.WHOLE, 3_700_000) is None
    assert expire(requests, 4 * 3_600_000, 4 * took_s) == []
    assert requests.num_wanted == 0


def test_a_request_that_nobody_answers_is_sent_again_ever_more_rarely_and_never_given_up() -> None:
    requests = ledger(1, max_resends=0)
    sent_ms, waits = 0, []
    for _ in range(8):
        (ask,) = send_all(requests, sent_ms)
        assert ask.deadline_ms is not None
        waits.append(ask.deadline_ms - sent_ms)
        assert expire(requests, ask.deadline_ms, 1.0) == []
        assert requests.num_wanted == 0
        sent_ms = ask.deadline_ms + 1
        assert expire(requests, sent_ms, 1.0) == []
        assert requests.num_wanted == 1
    assert waits == [1000 * factor for factor in (1, 2, 4, 8, 16, 32, 32, 32)]
    (ask,) = send_all(requests, sent_ms)
    assert requests.take(ask.correlation, reply(ask, ReplyOutcome.FAILED)).closing is not None


def test_a_group_that_is_whole_is_waited_for_however_long_its_rewards_take() -> None:
    requests = ledger(1)
    (ask,) = send_all(requests)
    requests.look(0, SeqState.WHOLE, 1)
    assert expire(requests, 10**9, 1.0) == []
    assert requests.current == frozenset()
    requests.take(ask.correlation, reply(ask, ReplyOutcome.EXPIRED))
    assert requests.num_wanted == 0
    requests.look(0, SeqState.CLOSED, 1)
    assert [each.seq for each in send_all(requests)] == [1]


def test_an_answer_to_an_earlier_request_of_the_seq_counts_and_its_late_refusal_does_not() -> None:
    requests = ledger(1, max_resends=2)
    (first,) = send_all(requests)
    expire(requests, 1001, 1.0)
    (second,) = send_all(requests, 2000)
    assert requests.take(first.correlation, reply(first, ReplyOutcome.NOT_READY)).fate is ReplyFate.UNFULFILLED
    assert requests.num_wanted == 0, "the second request is on its way"
    assert requests.take(second.correlation, reply(second)).fate is ReplyFate.ACCEPTED
    assert requests.take(second.correlation, reply(second)).fate is ReplyFate.DUPLICATE


def test_a_receipt_slower_than_its_group_is_accepted_once_and_a_false_one_noted() -> None:
    requests = ledger(2)
    asks = send_all(requests)
    requests.trained([0, 1])
    requests.begin(5, "b" * 64)
    assert requests.take(asks[0].correlation, reply(asks[0])).fate is ReplyFate.ACCEPTED
    assert requests.take(asks[0].correlation, reply(asks[0])).fate is ReplyFate.DUPLICATE
    verdict = requests.take(asks[1].correlation, reply(asks[1], version=3))
    assert (verdict.fate, verdict.closing) == (ReplyFate.REFUSED, None)


def test_what_speaks_against_a_request_counts_from_whoever_may_have_it() -> None:
    requests = ledger(1, max_resends=0)
    (ask,) = send_all(requests)
    for outcome, changes in ((ReplyOutcome.FAILED, {}), (ReplyOutcome.NOT_READY, {}), (ReplyOutcome.DONE, {"version": 3})):
        verdict = requests.take(ask.correlation, reply(ask, outcome, **changes), is_holder=False)
        assert (verdict.fate, verdict.closing) == (ReplyFate.FOREIGN, None)
    assert requests.open_seqs == {0}
    assert requests.take(ask.correlation, reply(ask)).fate is ReplyFate.ACCEPTED, "the holder's own answer still counts"


def test_a_false_receipt_does_not_count_against_what_the_log_holds() -> None:
    requests = ledger(1)
    (ask,) = send_all(requests)
    requests.look(0, SeqState.WHOLE, 1_000)
    verdict = requests.take(ask.correlation, reply(ask, where=PLACES[:1]))
    assert (verdict.fate, verdict.closing) == (ReplyFate.REFUSED, None)
    assert requests.open_seqs == {0}


# What the world may do to one request of a step, in turn.
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["done", "whole", "closed", "failed", "not_ready", "expired", "false", "repeat", "silence", "forgery"]),
        st.integers(0, 7),
    ),
    max_size=60,
)


@given(events=EVENTS, max_resends=st.integers(0, 3), num_groups=st.integers(1, 4))
def test_whatever_happens_answers_count_once_resends_end_and_the_batch_can_fill(
    events: list[tuple[str, int]], max_resends: int, num_groups: int
) -> None:
    requests = ledger(num_groups, max_resends)
    sent: list[Ask] = []
    accepted: Counter[str] = Counter()
    sends: Counter[int] = Counter()
    closed: Counter[int] = Counter()
    silences: Counter[int] = Counter()
    now_ms = 0

    def note(ask: Ask, answer: RolloutReply) -> None:
        verdict = requests.take(ask.correlation, answer)
        if verdict.fate is ReplyFate.ACCEPTED:
            accepted[ask.correlation] += 1
        if verdict.closing is not None:
            closed[verdict.closing.seq] += 1

    for event, which in events:
        for ask in send_all(requests, now_ms):
            sent.append(ask)
            sends[ask.seq] += 1
        ask = sent[-1 - which % len(sent)]
        if event in {"done", "repeat"}:
            note(ask, reply(ask))
        elif event in {"whole", "closed"}:
            if ask.seq in requests.open_seqs:
                requests.look(ask.seq, SeqState(event), now_ms)
        elif event == "false":
            note(ask, reply(ask, version=3) if which % 2 else reply(ask, where=PLACES[:1]))
        elif event == "silence":
            now_ms += 200_000
            silences.update(seq for seq in requests.open_seqs)
            for closing in expire(requests, now_ms, 1.0):
                closed[closing.seq] += 1
        elif event == "forgery":
            assert requests.take("nobody's", reply(ask)).fate is ReplyFate.UNKNOWN
        else:
            note(ask, reply(ask, ReplyOutcome(event)))
        assert len(requests.open_seqs) == num_groups
        assert not closed.keys() & requests.open_seqs, "a seq that was given up is open"
    assert all(count == 1 for count in accepted.values())
    assert all(count == 1 for count in closed.values())
    assert all(count <= max_resends + 1 + silences[seq] for seq, count in sends.items())
    # From any state good workers fill the batch: nothing that is neither on its way nor whole is left unwanted.
    for _ in range(max_resends + 2):
        for ask in send_all(requests, now_ms):
            requests.look(ask.seq, SeqState.WHOLE, now_ms)
        now_ms += 200_000
        expire(requests, now_ms, 1.0)
    batch = requests.open_seqs
    for seq in batch:
        requests.look(seq, SeqState.WHOLE, now_ms)
    requests.trained(batch)
    requests.begin(5, SHA)
    assert not requests.open_seqs & batch
    assert len(requests.open_seqs) == num_groups
