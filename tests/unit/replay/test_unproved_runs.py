"""What retention has removed is reported as unproved, never as passed; and what an audit meets while a run goes on is no fault."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import TopicPartition

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_bus.errors import DeadlineExceeded
from echo_replay.audit import audit_run
from echo_replay.verdicts import Promise, Verdict
from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import UserError
from echo_schemas.records import BlobRef, Drop, Purpose, Record, Run, StepReport, Trajectory
from echo_schemas.topics import DROPS, RUNS, STEPS, TRAJECTORIES, WEIGHT_CHUNKS, Topic
from tests.unit.learner.pipeline import NUM_PARTITIONS, Pipeline, sample
from tests.unit.replay.forged import SoundRun, only, without_any_policy
from tests.unit.replay.test_broken_runs import drop_of

PROVED, UNPROVED, BROKEN = Verdict.PROVED, Verdict.UNPROVED, Verdict.BROKEN


def remove(pipeline: Pipeline, topic: Topic, below: int, partition: int | None = None) -> None:
    """Retention takes everything below an offset."""
    physical = pipeline.namespace.topic(topic)
    known = range(NUM_PARTITIONS if topic is not STEPS else 1) if partition is None else [partition]
    for future in pipeline.cluster.admin().delete_records([TopicPartition(physical, number, below) for number in known]).values():
        future.result(10)


def verdicts(pipeline: Pipeline) -> dict[Promise, Verdict]:
    return {finding.promise: finding.verdict for finding in audit_run(pipeline.bus, "demo").findings}


def test_trajectories_that_retention_has_removed(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    remove(copy, TRAJECTORIES, 6)
    found = verdicts(copy)
    assert {promise for promise, verdict in found.items() if verdict is UNPROVED} == {Promise.ONE_STATE, Promise.STALENESS, Promise.TAGS}
    assert BROKEN not in found.values()
    gaps = audit_run(copy.bus, "demo").finding(Promise.ONE_STATE).gaps
    assert any("trained records are not in the log any more" in gap for gap in gaps)


def test_reports_that_retention_has_removed(sound: SoundRun, tmp_path: Path) -> None:
    """What they trained has no state that can still be seen; that is no proof that it was lost."""
    copy = sound.forge(tmp_path)
    offsets = [where.offset for where, _ in copy.placed(STEPS, StepReport)]
    remove(copy, STEPS, offsets[2])
    found = verdicts(copy)
    assert found == {
        Promise.ONE_STATE: UNPROVED,
        Promise.SEQS: UNPROVED,
        Promise.STALENESS: PROVED,
        Promise.VERSIONS: PROVED,
        Promise.CURRENT: PROVED,
        Promise.TAGS: PROVED,
        Promise.REQUESTS: UNPROVED,
        Promise.CHAIN: UNPROVED,
    }
    report = audit_run(copy.bus, "demo")
    assert report.finding(Promise.CHAIN).gaps == ["the reports before version 3 were removed by retention"]


def test_drops_that_retention_has_removed(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    remove(copy, DROPS, 1_000)
    found = verdicts(copy)
    assert found[Promise.ONE_STATE] is UNPROVED
    assert BROKEN not in found.values()


def test_old_snapshots_may_go_and_the_newest_may_not(sound: SoundRun, tmp_path: Path) -> None:
    newest = sound.pipeline.manifests()[-1].blob
    assert newest is not None
    copy = sound.forge(tmp_path / "old")
    remove(copy, WEIGHT_CHUNKS, newest.first_offset, newest.partition)
    assert verdicts(copy)[Promise.CURRENT] is UNPROVED
    remove(copy, WEIGHT_CHUNKS, newest.last_offset + 1, newest.partition)
    finding = audit_run(copy.bus, "demo").finding(Promise.CURRENT)
    assert finding.verdict is BROKEN
    assert "retention has removed" in finding.examples[0].says


def test_a_run_whose_policy_nobody_wrote_down(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, without_any_policy)
    finding = audit_run(copy.bus, "demo").finding(Promise.STALENESS)
    assert finding.verdict is UNPROVED
    assert "neither the reports nor `runs` say" in finding.gaps[0]


def in_blobs(pipeline: Pipeline, copy_to: Path, sound: SoundRun, *, garbage: bool = False) -> Pipeline:
    """A copy in which every batch lies in a blob beside its report."""
    target = Pipeline(copy_to)
    publisher = target.bus.publisher()
    writer = target.bus.blob_writer(publisher)
    blobs: dict[int, BlobRef] = {}
    for report in pipeline.reports():
        data = b"garbage" if garbage else lock_file_codec().encode(report)
        blobs[report.version] = writer.write(STEPS, "demo", f"report/{report.version}", data)
    publisher.close()

    def outside(report: StepReport) -> Iterable[Record]:
        yield replace(report, batch=None, batch_blob=blobs[report.version])

    return sound.forge(copy_to, only(StepReport, outside), into=target)


def test_batches_in_blobs_are_fetched(sound: SoundRun, tmp_path: Path) -> None:
    copy = in_blobs(sound.pipeline, tmp_path, sound)
    assert set(verdicts(copy).values()) == {PROVED}


def test_a_batch_whose_blob_is_garbage(sound: SoundRun, tmp_path: Path) -> None:
    report = audit_run(in_blobs(sound.pipeline, tmp_path, sound, garbage=True).bus, "demo")
    assert "cannot be read" in report.finding(Promise.ONE_STATE).examples[0].says


def test_a_batch_whose_blob_retention_has_removed(sound: SoundRun, tmp_path: Path) -> None:
    copy = in_blobs(sound.pipeline, tmp_path, sound)
    remove(copy, STEPS, 3, 0)
    finding = audit_run(copy.bus, "demo").finding(Promise.ONE_STATE)
    assert finding.verdict is UNPROVED
    assert "the batch of version 1 was removed by retention" in finding.gaps


def test_a_record_under_our_key_that_is_another_runs(sound: SoundRun, tmp_path: Path) -> None:
    """The body decides, for the learner and for the audit."""
    copy = sound.forge(tmp_path)
    body = lock_file_codec().encode(sample(0, 0, run_id="other"))
    copy.cluster.producer({}).produce(copy.namespace.topic(TRAJECTORIES), body, "demo/0", 0)
    assert set(verdicts(copy).values()) == {PROVED}


def test_a_drop_that_comes_while_the_audit_reads(sound: SoundRun, tmp_path: Path) -> None:
    """A transaction that is open while `steps` is read is waited for, and what it drops is no lost record."""
    lost = next(drop for drop in sound.pipeline.drops() if drop.what)
    copy = sound.forge(tmp_path, only(Drop, lambda drop: () if drop == lost else (drop,)))
    assert verdicts(copy)[Promise.ONE_STATE] is BROKEN
    writer = copy.bus.transactions("learner")
    writer.start()
    waited: list[str] = []

    def commit(operation: str) -> None:
        # The first reading beyond the open transaction ends it.
        if operation == "poll" and not waited:
            waited.append(operation)
            copy.cluster.faults.before = None
            transaction.__exit__(None, None, None)

    transaction = writer.transaction()
    transaction.__enter__().publish(DROPS, lost)
    copy.cluster.faults.before = commit
    assert verdicts(copy)[Promise.ONE_STATE] is PROVED
    assert waited


def test_a_transaction_that_stays_open(sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_replay.run_log._SETTLE_S", 0.0)
    copy = sound.forge(tmp_path)
    writer = copy.bus.transactions("learner")
    writer.start()
    with writer.transaction() as transaction:
        transaction.publish(DROPS, drop_of(50, None))
        with pytest.raises(DeadlineExceeded, match="has stayed open"):
            audit_run(copy.bus, "demo")


def test_a_run_that_nobody_knows(sound: SoundRun) -> None:
    with pytest.raises(UserError, match="knows no run 'demos'"):
        audit_run(sound.pipeline.bus, "demos")


def test_a_run_that_has_not_begun_is_sound(tmp_path: Path, sound: SoundRun) -> None:
    copy = Pipeline(tmp_path)
    copy.write(RUNS, *(record for record in sound.pipeline.read(RUNS, Run)))
    assert set(verdicts(copy).values()) == {PROVED}


def test_a_topic_that_was_made_anew_and_gone_on_with(sound: SoundRun, tmp_path: Path) -> None:
    """From version 5 on the positions begin again: what older coordinates named is another log's."""

    def again(report: StepReport) -> Iterable[Record]:
        moved = tuple(replace(position, low=0, read_to=position.read_to // 2) for position in report.positions)
        yield replace(report, positions=moved) if report.version >= 5 else report

    def other_samples(trajectory: Trajectory) -> Iterable[Record]:
        yield replace(trajectory, attempt="new") if trajectory.seq < 4 and trajectory.purpose is Purpose.TRAIN else trajectory

    def both(topic: Topic, record: Record) -> Iterable[Record]:
        (step,) = only(StepReport, again)(topic, record)
        return only(Trajectory, other_samples)(topic, step)

    assert verdicts(sound.forge(tmp_path / "plain", only(Trajectory, other_samples)))[Promise.ONE_STATE] is BROKEN
    copy = sound.forge(tmp_path / "anew", both)
    finding = audit_run(copy.bus, "demo").finding(Promise.ONE_STATE)
    assert not [example for example in finding.examples if example.where.get("version", 9) < 5]
    assert any("are not in the log any more" in gap for gap in finding.gaps)
