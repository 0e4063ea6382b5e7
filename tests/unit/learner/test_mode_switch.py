"""A run that goes on in the other mode: from its tip, with what the other mode left open closed and nothing trained twice."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_core.closed_seqs import ClosedSeqs
from echo_learner.sequential.open_requests import find_left_over
from echo_schemas.errors import UserError
from echo_schemas.records import DropReason, Purpose, RolloutRequest, Sampling, group_id_of
from echo_schemas.topics import REQUESTS
from tests.unit.learner.answerer import Answerer
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import Pipeline, assert_books, fill
from tests.unit.learner.test_asking import SEQUENTIAL, batch_seqs, reasons

NOW_MS = 1_000_000


@pytest.fixture(autouse=True)
def _reading_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_learner.sequential.replies._READ_S", 0.003)


def request(seq: int, **changes: Any) -> RolloutRequest:
    """One of asynchronous mode, unless `changes` say otherwise."""
    fields: dict[str, Any] = {
        "run_id": "demo",
        "group_id": group_id_of("demo", seq),
        "seq": seq,
        "purpose": Purpose.TRAIN,
        "task": "letters",
        "prompt_token_ids": b"\x01\x00\x00\x00",
        "group_size": 2,
        "sampling": Sampling(max_new_tokens=2),
        "required_version": 0,
        "learner_version": 0,
        "issued_ms": NOW_MS - 10,
        "deadline_ms": NOW_MS + 10_000,
    }
    return RolloutRequest(**{**fields, **changes})


def exact(seq: int, version: int, **changes: Any) -> RolloutRequest:
    return request(seq, **{"exact": True, "required_version": version, "correlation": f"c-{seq}", **changes})


def test_every_seq_that_is_not_closed_is_waited_for_asked_again_or_closed() -> None:
    shown = [
        exact(3, 7),
        exact(4, 7, deadline_ms=NOW_MS - 1),
        exact(5, 6),
        request(6),
        exact(8, 7, resends=0),
        exact(8, 7, resends=1, correlation="c-8-1"),
        exact(1, 7),
    ]
    found = find_left_over(shown, ClosedSeqs(2, (9,)), version=7, is_sequential=True, now_ms=NOW_MS)
    assert [(ask.seq, ask.correlation, ask.resends) for ask in found.on_their_way] == [(3, "c-3", 0), (8, "c-8-1", 1)]
    assert found.again == (2, 4, 5, 7)
    assert found.other_mode == (6,)
    assert found.next_seq == 10


def test_seqs_that_nobody_issued_make_no_list_of_all_those_below_them() -> None:
    found = find_left_over([exact(3, 7), exact(10**12, 7)], ClosedSeqs(2, (10**9,)), version=7, is_sequential=True, now_ms=NOW_MS)
    assert ([ask.seq for ask in found.on_their_way], found.again, found.next_seq) == ([3], (2,), 4)


def test_an_asynchronous_run_closes_what_was_asked_for_exactly_and_leaves_the_rest_to_the_feeder() -> None:
    found = find_left_over([exact(2, 7), request(3)], ClosedSeqs(1), version=7, is_sequential=False, now_ms=NOW_MS)
    assert (found.other_mode, found.on_their_way, found.next_seq) == ((2,), (), 4)


def test_from_asynchronous_to_sequential(pipeline: Pipeline) -> None:
    pipeline.write(REQUESTS, *(request(seq) for seq in range(9)))
    fill(pipeline, 3)
    pipeline.train(NumpyTrainer(), steps=2)
    assert batch_seqs(pipeline) == [[0, 1], [2, 3]]
    with Answerer(pipeline, lambda asked: asked.answer() if asked.request.exact else None) as answerer:
        pipeline.train(NumpyTrainer(), steps=4, takeover=True, **SEQUENTIAL)
    assert sorted(request.seq for request in answerer.seen if request.exact) == [9, 10, 11, 12]
    assert batch_seqs(pipeline)[2:] == [[9, 10], [11, 12]]
    assert reasons(pipeline) == dict.fromkeys(range(4, 9), DropReason.MODE_SWITCH)
    assert {report.staleness_total for report in pipeline.reports()[2:]} == {(4,)}
    assert_books(pipeline)


def test_from_sequential_to_asynchronous(pipeline: Pipeline) -> None:
    with Answerer(pipeline, lambda asked: asked.answer() if asked.request.required_version < 2 else None) as answerer:
        first = pipeline.start(NumpyTrainer(), **SEQUENTIAL)
        first.wait_until(lambda: len(answerer.seen) == 6, "the third batch to be asked for")
        first.stop()
    pipeline.write(REQUESTS, request(6), request(7))
    fill(pipeline, 4, start=3, version=2)
    pipeline.train(NumpyTrainer(), steps=3, takeover=True)
    assert batch_seqs(pipeline) == [[0, 1], [2, 3], [6, 7]]
    assert reasons(pipeline) == dict.fromkeys((4, 5), DropReason.MODE_SWITCH)
    assert_books(pipeline)


def test_a_version_that_the_other_mode_did_not_publish_is_published_before_it_is_asked_for(pipeline: Pipeline) -> None:
    staleness = {"budget": 3, "publication_period": 2}
    fill(pipeline, 4)
    first = pipeline.start(NumpyTrainer(), staleness=staleness, learner={"steps": 9})
    first.wait_until(lambda: first.trainer.batches[2:], "the third step")
    first.wait_for_value("echo_learner_version", 4)
    first.stop()
    fill(pipeline, 5, start=4, version=4)
    second = pipeline.start(NumpyTrainer(), takeover=True, staleness=staleness, learner={"steps": 9})
    second.wait_for_value("echo_learner_version", 5)
    second.stop()
    assert [manifest.version for manifest in pipeline.manifests()] == [0, 2, 4]
    with Answerer(pipeline):
        pipeline.train(NumpyTrainer(), steps=6, takeover=True, staleness={"budget": 3, "publication_period": 1}, **SEQUENTIAL)
    assert [manifest.version for manifest in pipeline.manifests()] == [0, 2, 4, 5, 6]
    assert [report.version for report in pipeline.reports()] == [1, 2, 3, 4, 5, 6]
    assert_books(pipeline)


def test_other_meaning_is_no_more_allowed_to_change_than_before(pipeline: Pipeline) -> None:
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    with pytest.raises(UserError, match=r"rollout\.temperature"):
        pipeline.train(NumpyTrainer(), steps=2, takeover=True, rollout={"temperature": 0.5}, **SEQUENTIAL)
    with pytest.raises(UserError, match=r"staleness\.budget"):
        pipeline.train(NumpyTrainer(), steps=2, takeover=True, staleness={"budget": 5})
