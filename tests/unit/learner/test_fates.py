"""Every record meets one end: trained, or dropped once with its reason, in the log and in the metrics. Whatever it is, the run goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.dead_letter_budget import DeadLetterLimits
from echo_bus.errors import TransportError
from echo_learner.admission import AdmissionLimits
from echo_learner.metrics import LearnerMetrics
from echo_replay.audit import audit_run
from echo_replay.verdicts import Promise, Verdict
from echo_schemas.columns import pack_tokens
from echo_schemas.records import Coordinates, DropReason, Purpose, Span, VersionSpan
from echo_schemas.topics import REWARDS, TRAJECTORIES
from tests.unit.learner.numpy_trainer import VOCABULARY, NumpyTrainer
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, Pipeline, assert_books, fill, sample

# Above every seq that `fill` writes.
ODD = 100


def assert_dropped(
    pipeline: Pipeline, metrics: LearnerMetrics, records: Mapping[Coordinates, DropReason], seqs: Mapping[int, DropReason] | None = None
) -> None:
    """Exactly these were dropped, once each and for these reasons, in the log and in the metrics; all other records were trained."""
    accounts = pipeline.accounts()
    accounts.assert_each_once()
    assert {where: reason for where, (reason,) in accounts.dropped.items()} == records
    assert {seq: reason for seq, (reason,) in accounts.seqs_dropped.items()} == (seqs or {})
    counted = {
        (name, what): count
        for what in ("trajectory", "group")
        for name in DropReason
        if (count := metrics.registry.get_sample_value("echo_learner_dropped_total", {"reason": name.value, "what": what}))
    }
    expected = Counter((why, "trajectory") for why in records.values()) + Counter((why, "group") for why in (seqs or {}).values())
    assert counted == expected
    assert_books(pipeline)


def test_samples_above_the_budget_are_stale(pipeline: Pipeline) -> None:
    fill(pipeline, 4)
    pipeline.train(NumpyTrainer(), steps=4)
    old = [pipeline.write_group(ODD + number) for number in range(2)]
    fill(pipeline, 5, start=4, version=4)
    metrics = pipeline.train(NumpyTrainer(), steps=5, takeover=True)
    assert_dropped(pipeline, metrics, dict.fromkeys([*old[0], *old[1]], DropReason.STALE), dict.fromkeys([ODD, ODD + 1], DropReason.STALE))
    assert {(drop.learner_version, drop.num_tokens, drop.version) for drop in pipeline.drops() if drop.what} == {(5, 2, 0)}
    assert max(len(report.staleness_total) - 1 for report in pipeline.reports()) <= 3


def test_one_stale_sample_leaves_its_group_to_the_others(pipeline: Pipeline) -> None:
    sections: dict[str, Any] = {"staleness": {"min_group_size": 1}}
    fill(pipeline, 4)
    pipeline.train(NumpyTrainer(), steps=4, **sections)
    mixed = [pipeline.sample(8, 0, version=0), pipeline.sample(8, 1, version=4)]
    places = pipeline.write(TRAJECTORIES, *mixed)
    for member, where in zip(mixed, places, strict=True):
        pipeline.write_reward(member, where, 1.0)
    pipeline.write_group(9, version=4)
    metrics = pipeline.train(NumpyTrainer(), steps=5, takeover=True, **sections)
    assert_dropped(pipeline, metrics, {places[0]: DropReason.STALE})
    batch = pipeline.reports()[-1].batch
    assert batch is not None
    assert batch.num_samples == 3


@pytest.mark.parametrize(("choice", "trained", "advantage_scale"), [("withhold", False, 0.0), ("downweight", True, 3 / 4)])
def test_a_stale_sample_may_stay_with_less_weight(pipeline: Pipeline, choice: str, *, trained: bool, advantage_scale: float) -> None:
    sections: dict[str, Any] = {"staleness": {"over_budget": choice, "min_group_size": 1}}
    fill(pipeline, 4)
    pipeline.train(NumpyTrainer(), steps=4, **sections)
    mixed = [pipeline.sample(8, 0, version=0), pipeline.sample(8, 1, version=4)]
    for member, where, value in zip(mixed, pipeline.write(TRAJECTORIES, *mixed), (0.0, 1.0), strict=True):
        pipeline.write_reward(member, where, value)
    pipeline.write_group(9, version=4)
    trainer = NumpyTrainer()
    pipeline.train(trainer, steps=5, takeover=True, **sections)
    (batch,) = trainer.batches
    assert batch.mask[:2].tolist() == [trained] * 2
    assert batch.mask[2:].all()
    assert batch.advantages[:2].tolist() == pytest.approx([-advantage_scale] * 2, rel=1e-3)
    assert batch.advantages[2:4].tolist() == pytest.approx([1.0] * 2, rel=1e-3)
    assert_books(pipeline)


def test_samples_of_weights_that_this_run_never_had_are_not_of_its_past(pipeline: Pipeline) -> None:
    foreign = pipeline.write_group(ODD, version=7)
    fill(pipeline, 1)
    metrics = pipeline.train(NumpyTrainer(), steps=1)
    why = DropReason.NOT_THIS_PAST
    assert_dropped(pipeline, metrics, dict.fromkeys(foreign, why), {ODD: why})


def test_too_many_groups_without_a_whole_attempt_push_the_oldest_out(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_learner.committer._DROPS_WAIT_S", 0.0)
    limit = 4 * (0 + 1 + 1) * GROUPS_PER_STEP
    running = pipeline.start(NumpyTrainer(), staleness={"budget": 0}, learner={"steps": 0})
    places = pipeline.write(TRAJECTORIES, *(pipeline.sample(seq, 0) for seq in range(limit + 2)))
    running.wait_until(
        lambda: running.value("echo_learner_dropped_total", reason="evicted", what="group") == 2, "the two oldest groups are dropped"
    )
    running.stop()
    accounts = pipeline.accounts()
    assert accounts.seqs_dropped == {0: ["evicted"], 1: ["evicted"]}
    assert accounts.dropped == {where: ["evicted"] for where in places[:2]}
    assert accounts.open == set(places[2:])
    assert "More than 16 groups without a whole attempt were open" in str(pipeline.drops()[0].detail)


def test_groups_whose_rewards_are_late_are_trained_when_these_come(pipeline: Pipeline) -> None:
    """More than may be open without a whole attempt: none is dropped, and the learner reads no further than it may hold."""
    steps, max_whole = 15, 2 * (1 + 2) * GROUPS_PER_STEP
    members = [pipeline.sample(seq, index) for seq in range(steps * GROUPS_PER_STEP) for index in range(GROUP_SIZE)]
    places = pipeline.write(TRAJECTORIES, *members)
    running = pipeline.start(NumpyTrainer(), staleness={"budget": 1, "over_budget": "downweight"}, learner={"steps": steps})
    running.wait_until(lambda: running.value("echo_learner_groups_open") > max_whole, "the learner holds what it may")
    for member, where in zip(members, places, strict=True):
        pipeline.write_reward(member, where, float(member.index))
    running.join()
    accounts = pipeline.accounts()
    accounts.assert_each_once()
    assert set(accounts.trained) == set(places)
    assert (accounts.dropped, accounts.seqs_dropped) == ({}, {})


def test_a_partition_whose_rewards_do_not_come_leaves_the_others_to_be_trained(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds more groups than the learner may."""
    monkeypatch.setattr("echo_learner.intake.READ_AT_ONCE", GROUP_SIZE)
    steps, max_whole = 10, 2 * (1 + 2) * GROUPS_PER_STEP
    members = [pipeline.sample(seq, index) for seq in range(60) for index in range(GROUP_SIZE)]
    placed = list(zip(members, pipeline.write(TRAJECTORIES, *members), strict=True))
    scored = {where for member, where in placed if where.partition == 1}
    assert len(placed) - len(scored) > GROUP_SIZE * max_whole
    for member, where in placed:
        if where in scored:
            pipeline.write_reward(member, where, float(member.index))
    pipeline.train(NumpyTrainer(), steps=steps, staleness={"budget": 1, "over_budget": "downweight"})
    accounts = pipeline.accounts()
    accounts.assert_each_once()
    assert len(accounts.trained) == steps * GROUPS_PER_STEP * GROUP_SIZE
    assert set(accounts.trained) <= scored


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_a_group_with_a_token_that_the_model_does_not_have_is_dropped(pipeline: Pipeline, token: int) -> None:
    bad = pipeline.write_group(0, token_ids=pack_tokens([0, 1, token]))
    fill(pipeline, 2, start=1)
    metrics = pipeline.train(NumpyTrainer(), steps=1)
    assert_dropped(pipeline, metrics, dict.fromkeys(bad, DropReason.MALFORMED), {0: DropReason.MALFORMED})
    assert "outside the vocabulary of 32" in str(pipeline.drops()[0].detail)


@pytest.mark.parametrize(
    ("changes", "why", "detail"),
    [
        ({"token_ids": pack_tokens([0] * 65)}, DropReason.OVERSIZED, "65 tokens, above 64"),
        (
            {"generated": (Span(start=0, end=2),), "version_spans": (VersionSpan(start=0, end=2, version=0),)},
            DropReason.MALFORMED,
            "no token before",
        ),
    ],
    ids=["too many tokens", "an answer to nothing"],
)
def test_what_else_the_model_cannot_take(changes: dict[str, Any], why: DropReason, detail: str) -> None:
    fault = AdmissionLimits(vocabulary=VOCABULARY, max_length=64).fault_of(sample(0, 0, **changes))
    assert fault is not None
    assert fault[0] is why
    assert detail in fault[1]


def test_a_probe_that_the_model_cannot_take_is_passed_over(pipeline: Pipeline) -> None:
    """A probe has no seq to close: it is no drop, but it must not end the run."""
    compared: list[int] = []

    class Comparing(NumpyTrainer):
        remembered = range(3)

        def logprobs_under(self, version: int, batch: Any) -> Sequence[Any]:
            assert batch.tokens.max() < VOCABULARY
            compared.append(int(batch.tokens[0]))
            return np.split(batch.sampler, np.cumsum(batch.num_generated)[:-1])

    for seq, token in ((0, VOCABULARY), (5, 2)):
        probes = [sample(seq, index, purpose=Purpose.PROBE, token_ids=pack_tokens([seq, 1, token])) for index in range(GROUP_SIZE)]
        pipeline.write(TRAJECTORIES, *probes)
    fill(pipeline, 2)
    metrics = pipeline.train(Comparing(), steps=2, rollout={"probe_size": GROUP_SIZE})
    assert compared == [5]
    # And one sample of what is trained, of the same version.
    assert metrics.registry.get_sample_value("echo_learner_probe_samples_total") == GROUP_SIZE + 1
    assert metrics.registry.get_sample_value("echo_learner_probe_samples_refused_total") == GROUP_SIZE
    assert not pipeline.drops()


def test_no_checkpoint_counts_a_record_as_read_whose_dead_letter_did_not_get_out(pipeline: Pipeline) -> None:
    """Otherwise nobody would ever say what became of it."""
    pipeline.write_bytes(TRAJECTORIES, b"not a record")
    fill(pipeline, 1)
    pipeline.cluster.faults.fail_next_produce(pipeline.namespace.dead_letters(TRAJECTORIES))
    with pytest.raises(TransportError, match="dlq"):
        pipeline.train(NumpyTrainer(), steps=1)
    assert pipeline.dead_letters(TRAJECTORIES) == []
    assert pipeline.reports() == []
    pipeline.train(NumpyTrainer(), steps=1, takeover=True)
    assert pipeline.dead_letters(TRAJECTORIES) == [b"not a record"]
    assert audit_run(pipeline.bus, "demo").finding(Promise.ONE_STATE).verdict is Verdict.PROVED


def test_hundreds_of_unreadable_records_end_nothing_and_are_all_accounted_for(pipeline: Pipeline) -> None:
    for number in range(150):
        pipeline.write_bytes(TRAJECTORIES, b"not a record %d" % number)
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    letters = pipeline.dead_letters(TRAJECTORIES)
    assert len(letters) == 150
    # Above the budget of a minute the copy says where the bytes lie.
    assert sum(letter != b"" for letter in letters) == DeadLetterLimits().per_writer
    assert audit_run(pipeline.bus, "demo").finding(Promise.ONE_STATE).verdict is Verdict.PROVED


def test_records_that_cannot_be_read_become_dead_letters(pipeline: Pipeline) -> None:
    for topic in (TRAJECTORIES, REWARDS):
        pipeline.write_bytes(topic, b"not a record")
    fill(pipeline, 1)
    metrics = pipeline.train(NumpyTrainer(), steps=1)
    assert pipeline.dead_letters(TRAJECTORIES) == pipeline.dead_letters(REWARDS) == [b"not a record"]
    assert_dropped(pipeline, metrics, {})
    newest = pipeline.store.load(pipeline.reports()[-1].checkpoint)
    assert sum(newest.assembly.trajectory_read_to.values()) == GROUPS_PER_STEP * GROUP_SIZE + 1


def test_records_of_other_runs_are_nobodys_business(pipeline: Pipeline) -> None:
    for seq in range(GROUPS_PER_STEP):
        pipeline.write_group(seq, run_id="other", values=(5.0, 6.0))
    fill(pipeline, 1)
    trainer = NumpyTrainer()
    metrics = pipeline.train(trainer, steps=1)
    assert len(trainer.batches) == 1
    assert pipeline.reports()[0].metrics["reward_max"] == 1.0
    assert_dropped(pipeline, metrics, {})


def test_a_second_attempt_and_a_record_written_again_are_dropped(pipeline: Pipeline) -> None:
    fill(pipeline, 1)
    (again,) = pipeline.write(TRAJECTORIES, sample(0, 0))
    others = pipeline.write_group(1, attempt="b")
    metrics = pipeline.train(NumpyTrainer(), steps=1)
    assert_dropped(pipeline, metrics, {again: DropReason.DUPLICATE, **dict.fromkeys(others, DropReason.OTHER_ATTEMPT)})


def test_a_record_of_a_trained_seq_is_a_duplicate_for_ever(pipeline: Pipeline) -> None:
    fill(pipeline, 1)
    pipeline.train(NumpyTrainer(), steps=1)
    late = pipeline.write_group(0, attempt="z")
    fill(pipeline, 2, start=1)
    metrics = pipeline.train(NumpyTrainer(), steps=2, takeover=True)
    assert_dropped(pipeline, metrics, dict.fromkeys(late, DropReason.DUPLICATE))


def test_samples_that_name_other_weights_than_those_published_are_of_a_wrong_version(pipeline: Pipeline) -> None:
    fill(pipeline, 1)
    metrics = pipeline.train(NumpyTrainer(), steps=1)
    false = pipeline.write_group(2, version=1, weights_sha256="e" * 64)
    for seq in (3, 4):
        pipeline.write_group(seq, version=1)
    metrics = pipeline.train(NumpyTrainer(), steps=2, takeover=True)
    why = DropReason.WRONG_VERSION
    assert_dropped(pipeline, metrics, dict.fromkeys(false, why), {2: why})
    assert_books(pipeline)
