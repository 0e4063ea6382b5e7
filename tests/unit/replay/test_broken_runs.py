"""Logs in which one promise is broken by hand: the audit names that promise, and the counter-example by its coordinates, seq or version."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the learner's types are torch's neighbours: install the extra 'learner'")

from echo_replay.audit import audit_run
from echo_replay.verdicts import AuditReport, Promise, Verdict
from echo_schemas.columns import OFFSET_DTYPE, TOKEN_DTYPE, pack
from echo_schemas.records import (
    Batch,
    Chunk,
    Coordinates,
    Drop,
    DropReason,
    Purpose,
    Record,
    ReplyOutcome,
    RolloutReply,
    Run,
    StepReport,
    Trajectory,
    WeightManifest,
)
from echo_schemas.topics import DROPS, REPLIES, REQUESTS, RUNS, STEPS, TRAJECTORIES, WEIGHTS, Topic
from tests.unit.learner.pipeline import Pipeline
from tests.unit.replay.forged import Edit, SoundRun, of_earlier_release, only, request_of, run_record

LAST = 6
Changed = Callable[[StepReport], StepReport]


def audit(pipeline: Pipeline) -> AuditReport:
    return audit_run(pipeline.bus, "demo")


def assert_broken(report: AuditReport, promise: Promise, says: str, **where: Any) -> None:
    """The promise is broken by exactly such a counter-example, among others perhaps."""
    finding = report.finding(promise)
    assert finding.verdict is Verdict.BROKEN
    assert report.verdict is Verdict.BROKEN
    matching = [example for example in finding.examples if says in example.says and where.items() <= example.where.items()]
    assert matching, f"no example says {says!r} of {where}: {finding.examples}"


def report_of(version: int, change: Changed) -> Edit:
    """An edit of one step's report."""
    return only(StepReport, lambda report: (change(report) if report.version == version else report,))


def governed(**policy: Any) -> Callable[[StepReport], tuple[StepReport]]:
    """A report under another policy."""

    def changed(report: StepReport) -> tuple[StepReport]:
        assert report.policy is not None
        return (replace(report, policy=replace(report.policy, **policy)),)

    return changed


def with_batch(change: Callable[[Batch], Batch]) -> Changed:
    def changed(report: StepReport) -> StepReport:
        assert report.batch is not None
        return replace(report, batch=change(report.batch))

    return changed


def column(data: bytes, dtype: np.dtype[Any], position: int, value: int) -> bytes:
    values = np.frombuffer(data, dtype).copy()
    values[position] = value
    return pack(values, dtype)


def batch_of(sound: SoundRun, version: int) -> Batch:
    (batch,) = (report.batch for report in sound.pipeline.reports() if report.version == version)
    assert batch is not None
    return batch


def place_of(batch: Batch, sample: int = 0) -> Coordinates:
    return Coordinates(
        partition=int(np.frombuffer(batch.partitions, TOKEN_DTYPE)[sample]), offset=int(np.frombuffer(batch.offsets, OFFSET_DTYPE)[sample])
    )


def drop_of(seq: int, what: Coordinates | None, **changes: Any) -> Drop:
    fields: dict[str, Any] = {"why": DropReason.DUPLICATE, "learner_version": 1, "time_ms": 1, "version": 0}
    return Drop(run_id="demo", group_id=f"demo/{seq}", seq=seq, what=what, **{**fields, **changes})


# One terminal state


def test_a_record_that_was_trained_and_dropped(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    batch = batch_of(sound, 2)
    where, seq = place_of(batch), int(np.frombuffer(batch.seqs, OFFSET_DTYPE)[0])
    copy.write(DROPS, drop_of(seq, where))
    assert_broken(audit(copy), Promise.ONE_STATE, "trained and dropped", partition=where.partition, offset=where.offset)


def test_a_record_that_was_dropped_twice(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, only(Drop, lambda drop: (drop, drop) if drop.what else (drop,)))
    assert_broken(audit(copy), Promise.ONE_STATE, "dropped twice")


def test_a_record_that_was_trained_in_two_steps(sound: SoundRun, tmp_path: Path) -> None:
    """The same records under other seqs, which only coordinates give away."""
    first = batch_of(sound, 1)

    def repeated(batch: Batch) -> Batch:
        return replace(batch, partitions=first.partitions, offsets=first.offsets)

    where = place_of(first)
    report = audit(sound.forge(tmp_path, report_of(3, with_batch(repeated))))
    assert_broken(report, Promise.ONE_STATE, "more than once", partition=where.partition, offset=where.offset, versions=[1, 3])
    assert_broken(report, Promise.ONE_STATE, "another sample than the one", version=3)


def test_a_record_of_a_closed_seq_that_nobody_mentions(sound: SoundRun, tmp_path: Path) -> None:
    """The drop of a late attempt's member is gone."""
    lost = next(drop.what for drop in sound.pipeline.drops() if drop.what)
    copy = sound.forge(tmp_path, only(Drop, lambda drop: () if drop.what == lost else (drop,)))
    assert_broken(audit(copy), Promise.ONE_STATE, "of a closed seq", partition=lost.partition, offset=lost.offset)


def test_a_record_that_nobody_can_read_and_nobody_put_aside(sound: SoundRun, tmp_path: Path) -> None:
    messages = tuple(kept for kept in sound.messages if not kept.physical.endswith("trajectories.dlq"))
    copy = SoundRun(sound.pipeline, messages).forge(tmp_path)
    assert_broken(audit(copy), Promise.ONE_STATE, "not in the dead letters", seq=-1)


def test_a_dead_letter_of_another_reader_is_no_terminal_state(sound: SoundRun, tmp_path: Path) -> None:
    def of_rewards(name: str, value: bytes) -> bytes:
        return b"echo.test.reward" if name == "__connect.errors.connector.name" else value

    messages = tuple(
        replace(kept, headers=[(name, of_rewards(name, value)) for name, value in kept.headers]) if kept.physical.endswith(".dlq") else kept
        for kept in sound.messages
    )
    assert_broken(audit(SoundRun(sound.pipeline, messages).forge(tmp_path)), Promise.ONE_STATE, "not in the dead letters")


def test_a_record_that_was_trained_and_is_a_dead_letter(sound: SoundRun, tmp_path: Path) -> None:
    where = place_of(batch_of(sound, 1))

    def of_trained(name: str, value: bytes) -> bytes:
        named = {"__connect.errors.partition": where.partition, "__connect.errors.offset": where.offset}
        return str(named[name]).encode() if name in named else value

    messages = tuple(
        replace(kept, headers=[(name, of_trained(name, value)) for name, value in kept.headers]) if kept.physical.endswith(".dlq") else kept
        for kept in sound.messages
    )
    report = audit(SoundRun(sound.pipeline, messages).forge(tmp_path))
    assert_broken(report, Promise.ONE_STATE, "trained and dead", partition=where.partition, offset=where.offset)


def test_a_record_that_was_refused_under_other_settings_and_then_trained_is_trained(sound: SoundRun, tmp_path: Path) -> None:
    where = place_of(batch_of(sound, 1))
    changed = {"__connect.errors.partition": str(where.partition), "__connect.errors.offset": str(where.offset), "echo-reason": "not_asked"}
    refused = tuple(
        replace(kept, headers=[(name, changed[name].encode() if name in changed else value) for name, value in kept.headers])
        for kept in sound.messages
        if kept.physical.endswith("trajectories.dlq")
    )
    report = audit(SoundRun(sound.pipeline, (*sound.messages, *refused)).forge(tmp_path))
    assert report.verdict is Verdict.PROVED


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"offset": 10_000}, "not in the log"),
        ({"partition": 7}, "a partition that is not there"),
        ({"seq": 3}, "a record of another seq"),
    ],
)
def test_a_drop_of_what_is_not_there(sound: SoundRun, tmp_path: Path, changes: dict[str, int], says: str) -> None:
    copy = sound.forge(tmp_path)
    where = place_of(batch_of(sound, 1))
    what = replace(where, **{name: value for name, value in changes.items() if name != "seq"})
    copy.write(DROPS, drop_of(changes.get("seq", 0), what))
    assert_broken(audit(copy), Promise.ONE_STATE, says)


@pytest.mark.parametrize(
    ("name", "value", "says"), [("offsets", 10_000, "not in the log"), ("partitions", 9, "partition that is not there")]
)
def test_a_step_that_trained_what_is_not_there(sound: SoundRun, tmp_path: Path, name: str, value: int, says: str) -> None:
    dtype = OFFSET_DTYPE if name == "offsets" else TOKEN_DTYPE

    def elsewhere(batch: Batch) -> Batch:
        changed: dict[str, Any] = {name: column(getattr(batch, name), dtype, 1, value)}
        return replace(batch, **changed)

    assert_broken(audit(sound.forge(tmp_path, report_of(2, with_batch(elsewhere)))), Promise.ONE_STATE, says, version=2)


def test_a_sample_of_a_probe_that_was_trained(sound: SoundRun, tmp_path: Path) -> None:
    (where,) = (
        where for where, record in sound.pipeline.placed(TRAJECTORIES, Trajectory) if record.purpose is Purpose.PROBE and record.index == 0
    )

    def with_probe(batch: Batch) -> Batch:
        return replace(
            batch,
            partitions=column(batch.partitions, TOKEN_DTYPE, 0, where.partition),
            offsets=column(batch.offsets, OFFSET_DTYPE, 0, where.offset),
        )

    report = audit(sound.forge(tmp_path, report_of(1, with_batch(with_probe))))
    assert_broken(report, Promise.ONE_STATE, "a probe was trained", version=1, partition=where.partition, offset=where.offset)


def test_a_batch_whose_columns_contradict_one_another(sound: SoundRun, tmp_path: Path) -> None:
    def shorter(batch: Batch) -> Batch:
        return replace(batch, group_sizes=pack([1, 2], TOKEN_DTYPE))

    assert_broken(audit(sound.forge(tmp_path, report_of(4, with_batch(shorter)))), Promise.ONE_STATE, "contradict", version=4)


# Seqs


def test_a_seq_that_was_trained_in_two_steps(sound: SoundRun, tmp_path: Path) -> None:
    taken = int(np.frombuffer(batch_of(sound, 1).seqs, OFFSET_DTYPE)[0])

    def again(batch: Batch) -> Batch:
        return replace(batch, seqs=column(column(batch.seqs, OFFSET_DTYPE, 0, taken), OFFSET_DTYPE, 1, taken))

    report = audit(sound.forge(tmp_path, report_of(5, with_batch(again))))
    assert_broken(report, Promise.SEQS, "in several steps", seq=taken, versions=[1, 5])


def test_a_seq_that_was_trained_and_dropped(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    copy.write(DROPS, drop_of(2, None))
    assert_broken(audit(copy), Promise.SEQS, "trained and dropped", seq=2)


def test_a_seq_that_was_dropped_twice(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    copy.write(DROPS, drop_of(40, None), drop_of(40, None))
    assert_broken(audit(copy), Promise.SEQS, "dropped more than once", seq=40)


def test_a_seq_below_the_floor_that_was_skipped(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, only(WeightManifest, lambda manifest: (replace(manifest, next_seq=manifest.next_seq + 30),)))
    (example,) = audit(copy).finding(Promise.SEQS).examples
    assert "neither trained nor dropped" in example.says
    assert set(example.where["seqs"]) >= {13, 14, 15}


def test_a_floor_that_goes_back(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, only(WeightManifest, lambda each: (replace(each, next_seq=0) if each.version == LAST else each,)))
    assert_broken(audit(copy), Promise.SEQS, "floor of the seqs went back", version=LAST)


# What the policy allows


def test_a_sample_that_was_too_old(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, only(StepReport, governed(budget=1)))
    assert_broken(audit(copy), Promise.STALENESS, "policy does not allow", staleness=2, budget=1)


def test_a_sample_that_was_too_old_by_reports_of_an_earlier_release(sound: SoundRun, tmp_path: Path) -> None:
    def edit(topic: Topic, record: Record) -> Iterable[Record]:
        if isinstance(record, Run):
            return (replace(record, staleness_budget=1, config='{"staleness": {"budget": 1}}'),)
        return of_earlier_release(topic, record)

    assert_broken(audit(sound.forge(tmp_path, edit)), Promise.STALENESS, "policy does not allow", staleness=2, budget=1)


def test_the_configuration_of_a_start_that_was_refused_makes_no_breaks(sound: SoundRun, tmp_path: Path) -> None:
    refused = run_record(sound.pipeline, budget=1)
    copy = sound.forge(tmp_path, only(Run, lambda _: (refused,)))
    assert audit(copy).finding(Promise.STALENESS).verdict is Verdict.PROVED


def test_the_configuration_of_a_start_that_was_refused_hides_no_breaks(sound: SoundRun, tmp_path: Path) -> None:
    refused = run_record(sound.pipeline, budget=100)

    def edit(_topic: Topic, record: Record) -> Iterable[Record]:
        if isinstance(record, Run):
            return (refused,)
        return governed(budget=1)(record) if isinstance(record, StepReport) else (record,)

    assert_broken(audit(sound.forge(tmp_path, edit)), Promise.STALENESS, "policy does not allow", staleness=2, budget=1)


def test_a_sample_from_the_future(sound: SoundRun, tmp_path: Path) -> None:
    def from_later(trajectory: Trajectory) -> Iterable[Record]:
        is_it = trajectory.seq == 0 and trajectory.purpose is Purpose.TRAIN
        spans = tuple(replace(span, version=4) for span in trajectory.version_spans)
        yield replace(trajectory, min_version=4, max_version=4, version_spans=spans) if is_it else trajectory

    assert_broken(
        audit(sound.forge(tmp_path, only(Trajectory, from_later))), Promise.STALENESS, "policy does not allow", seq=0, staleness=-4
    )


def test_older_samples_that_the_policy_keeps_are_no_fault(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, only(StepReport, governed(budget=1, over_budget="withhold")))
    assert audit(copy).finding(Promise.STALENESS).verdict is Verdict.PROVED


def test_a_sequential_step_takes_nothing_older(sound: SoundRun, tmp_path: Path) -> None:
    def sequential(report: StepReport) -> StepReport:
        return replace(report, metrics={**report.metrics, "requests_sent": 2.0})

    report = audit(sound.forge(tmp_path, report_of(2, sequential)))
    assert_broken(report, Promise.STALENESS, "policy does not allow", version=2, staleness=1, budget=0)


def test_a_report_that_counts_another_staleness(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, report_of(2, lambda report: replace(report, staleness_total=(4,))))
    assert_broken(audit(copy), Promise.STALENESS, "counts another staleness", version=2, reported=[4], counted=[0, 4])


# Versions and bytes


def test_current_that_goes_back(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    old = sound.pipeline.manifests()[2]
    copy._publisher.publish(WEIGHTS, old, key="demo/current", partition=0)
    copy._publisher.flush(10)
    assert_broken(audit(copy), Promise.VERSIONS, "went back", version=2, before=LAST)


def test_a_version_with_two_checksums(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, report_of(3, lambda report: replace(report, snapshot_sha256="f" * 64)))
    assert_broken(audit(copy), Promise.VERSIONS, "different bytes", version=3)


def test_a_published_version_without_a_manifest(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, only(WeightManifest, lambda manifest: () if manifest.version == 3 else (manifest,)))
    report = audit(copy)
    assert_broken(report, Promise.VERSIONS, "manifest is not in the log", version=3)


# Blobs


def test_a_current_whose_bytes_are_others(sound: SoundRun, tmp_path: Path) -> None:
    def flipped(chunk: Chunk) -> Iterable[Record]:
        yield replace(chunk, data=chunk.data[::-1]) if chunk.blob.startswith(f"v/{LAST}/") else chunk

    report = audit(sound.forge(tmp_path, only(Chunk, flipped)))
    assert_broken(report, Promise.CURRENT, "checksum", version=LAST, is_current=True)


def test_a_current_whose_bytes_are_not_there(sound: SoundRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo_bus.blobs.cursor._MISSING_S", 0.0)

    def gone(chunk: Chunk) -> Iterable[Record]:
        return () if chunk.blob.startswith(f"v/{LAST}/") else (chunk,)

    assert_broken(audit(sound.forge(tmp_path, only(Chunk, gone))), Promise.CURRENT, "not in the log", version=LAST)


def test_a_snapshot_in_a_store_that_is_not_whole(sound: SoundRun, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    contents = sound.pipeline.blob(sound.pipeline.manifests()[-1])

    def stored(manifest: WeightManifest) -> Iterable[Record]:
        yield replace(manifest, blob=None, uri=folder.as_uri()) if manifest.version == LAST else manifest

    position = 0
    for file in sound.pipeline.manifests()[-1].files:
        (folder / file.name).write_bytes(contents[position : position + file.num_bytes])
        position += file.num_bytes
    copy = sound.forge(tmp_path / "copy", only(WeightManifest, stored))
    assert audit(copy).finding(Promise.CURRENT).verdict is Verdict.PROVED
    (folder / file.name).write_bytes(b"other")
    assert_broken(audit(copy), Promise.CURRENT, "not those that its manifest names", version=LAST)
    (folder / file.name).unlink()
    assert_broken(audit(copy), Promise.CURRENT, "not there whole", version=LAST)


# Tags


def test_a_trained_sample_of_weights_that_nobody_published(sound: SoundRun, tmp_path: Path) -> None:
    def claims(trajectory: Trajectory) -> Iterable[Record]:
        is_it = trajectory.seq in {1, 14} and trajectory.purpose is Purpose.TRAIN
        yield replace(trajectory, weights_sha256="e" * 64) if is_it else trajectory

    report = audit(sound.forge(tmp_path, only(Trajectory, claims)))
    assert_broken(report, Promise.TAGS, "not published as that version", seq=1, version=0, sha256="e" * 64)
    finding = report.finding(Promise.TAGS)
    assert {example.where["seq"] for example in finding.examples} == {1}, "what was not trained broke no promise"
    assert "not trained name other weights" in finding.notes[0]


# Requests


def reply(attempt: str, seq: int, correlation: str) -> RolloutReply:
    return RolloutReply(
        run_id="demo",
        correlation=correlation,
        group_id=f"demo/{seq}",
        attempt=attempt,
        worker_id="w",
        outcome=ReplyOutcome.DONE,
        version=0,
        weights_sha256="0" * 64,
        where=(Coordinates(partition=0, offset=0),),
        time_ms=1,
    )


def test_two_answers_to_one_request_that_were_both_trained(sound: SoundRun, tmp_path: Path) -> None:
    def split(batch: Batch) -> Batch:
        """The two members of the first group as two groups of two attempts."""
        return replace(batch, attempts=("a", "again", *batch.attempts[1:]), group_sizes=pack([1, 1, 2], TOKEN_DTYPE))

    copy = sound.forge(tmp_path, report_of(1, with_batch(split)))
    copy.write(REPLIES, reply("a", 0, "c-0"), reply("again", 0, "c-0"), partition=0)
    report = audit(copy)
    assert_broken(report, Promise.REQUESTS, "Two answers to one request", correlation="c-0", attempts=["a", "again"])
    assert_broken(report, Promise.REQUESTS, "two groups", version=1)


def test_an_answer_that_came_twice_and_was_taken_once(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    copy.write(REPLIES, reply("a", 0, "c-0"), reply("a", 0, "c-0"), reply("again", 0, "c-0"), partition=0)
    assert audit(copy).finding(Promise.REQUESTS).verdict is Verdict.PROVED


def test_one_correlation_id_for_two_seqs(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    copy.write(REPLIES, reply("a", 0, "c-0"), reply("a", 1, "c-0"), partition=0)
    assert_broken(audit(copy), Promise.REQUESTS, "several seqs", correlation="c-0", seqs=[0, 1])


def greedy(report: StepReport) -> StepReport:
    return replace(report, metrics={**report.metrics, "requests_sent": 2.0, "replies_accepted": 3.0})


def test_more_receipts_than_requests(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, report_of(1, greedy))
    copy.write(REQUESTS, *(request_of(seq, correlation=f"c-{seq}") for seq in range(2)))
    assert_broken(audit(copy), Promise.REQUESTS, "More receipts", receipts=3, requests=2)


def test_a_receipt_that_comes_after_its_step_counts_with_the_next(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, report_of(1, greedy))
    copy.write(REQUESTS, *(request_of(seq, correlation=f"c-{seq}") for seq in range(3)))
    assert audit(copy).finding(Promise.REQUESTS).verdict is Verdict.PROVED


def test_a_member_of_a_group_that_was_taken_twice(sound: SoundRun, tmp_path: Path) -> None:
    def twice(batch: Batch) -> Batch:
        return replace(batch, indices=column(batch.indices, TOKEN_DTYPE, 1, 0))

    assert_broken(audit(sound.forge(tmp_path, report_of(1, with_batch(twice)))), Promise.REQUESTS, "taken twice", version=1)


# The chain


def test_a_step_that_was_trained_from_another_checkpoint(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, report_of(4, lambda report: replace(report, parent="v3-00000000")))
    assert_broken(audit(copy), Promise.CHAIN, "predecessor's checkpoint", version=4, parent="v3-00000000")


def test_a_step_that_is_missing(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, only(StepReport, lambda report: () if report.version == 3 else (report,)))
    assert_broken(audit(copy), Promise.CHAIN, "missing between two reports", version=4, predecessor=2)


def test_a_version_with_two_reports(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path, only(StepReport, lambda report: (report, report) if report.version == 3 else (report,)))
    assert_broken(audit(copy), Promise.CHAIN, "several reports", version=3)


def test_steps_out_of_order(sound: SoundRun, tmp_path: Path) -> None:
    reports = {report.version: report for report in sound.pipeline.reports()}
    swapped = {2: 3, 3: 2}
    copy = sound.forge(tmp_path, only(StepReport, lambda report: (reports[swapped.get(report.version, report.version)],)))
    assert_broken(audit(copy), Promise.CHAIN, "behind a newer one", version=2, newer=3)


@pytest.mark.parametrize(("lost", "says"), [((1,), "not of the first step"), ((), "not trained from version 0")])
def test_a_history_without_its_beginning(sound: SoundRun, tmp_path: Path, lost: tuple[int, ...], says: str) -> None:
    def headless(report: StepReport) -> Iterable[Record]:
        if report.version not in lost:
            yield replace(report, parent="v7-x") if report.version == 1 else report

    assert_broken(audit(sound.forge(tmp_path, only(StepReport, headless))), Promise.CHAIN, says)


def test_what_is_no_record_on_steps_leaves_the_chain_unproved(sound: SoundRun, tmp_path: Path) -> None:
    copy = sound.forge(tmp_path)
    copy.write_bytes(STEPS, b"junk")
    report = audit(copy)
    assert report.finding(Promise.CHAIN).verdict is Verdict.UNPROVED
    assert "1 messages on steps are no records" in report.finding(Promise.CHAIN).gaps


def test_the_topics_of_a_promise_are_looked_at_for_this_run_alone(sound: SoundRun, tmp_path: Path) -> None:
    """Another run in the same namespace may break whatever it likes."""
    copy = sound.forge(tmp_path)
    for topic, records in _of_another_run(sound).items():
        copy.write(topic, *records, partition=0 if topic in {STEPS, RUNS} else None)
    assert audit(copy).verdict is Verdict.PROVED


def _of_another_run(sound: SoundRun) -> dict[Topic, list[Record]]:
    reports = sound.pipeline.reports()
    return {
        STEPS: [replace(report, run_id="other") for report in (reports[0], reports[0], reports[4])],
        DROPS: [replace(drop_of(1, Coordinates(partition=0, offset=0)), run_id="other", group_id="other/1")] * 2,
        RUNS: [run_record(sound.pipeline, "other")],
    }
