"""A run that a real learner made in memory, and copies of its log into other clusters with one thing changed.

Copies have no transactions, so offsets on `steps`, `drops` and `weights` close up; those of `trajectories` and `weights.chunks` stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from echo_replay.audit import audit_run
from echo_replay.verdicts import AuditReport
from echo_schemas.codec import lock_file_codec
from echo_schemas.columns import pack_logprobs
from echo_schemas.errors import InvalidRecord
from echo_schemas.records import (
    LogprobSource,
    Mode,
    Purpose,
    Record,
    RolloutRequest,
    Run,
    Sampling,
    StepReport,
    TrajectorySource,
    group_id_of,
)
from echo_schemas.topics import REQUESTS, RUNS, STEPS, TOPICS, TRAJECTORIES, Topic
from echo_settings.public import public_config
from tests.unit.learner.numpy_trainer import NumpyTrainer
from tests.unit.learner.pipeline import GROUP_SIZE, GROUPS_PER_STEP, Pipeline, sample

STEPS_TRAINED = 6
Edit = Callable[[Topic, Record], Iterable[Record]]
"""What stands in the place of a record: itself, others, or nothing."""
_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Kept:
    """A message of the sound run."""

    topic: Topic | None
    physical: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]]


@dataclass(frozen=True, slots=True)
class SoundRun:
    """The run as it is, and everything that its log holds, in order."""

    pipeline: Pipeline
    messages: tuple[Kept, ...]

    def audit(self) -> AuditReport:
        """Of the run itself."""
        return audit_run(self.pipeline.bus, "demo")

    def forge(self, folder: Path, edit: Edit | None = None, *, into: Pipeline | None = None) -> Pipeline:
        """A copy in a cluster of its own (or `into` one), each of the run's records in the place of what `edit` makes of it."""
        copy = into or Pipeline(folder)
        producer = copy.cluster.producer({})
        codec = lock_file_codec()
        for kept in self.messages:
            values: list[tuple[bytes | None, bytes | None]] = [(kept.key, kept.value)]
            if edit is not None and kept.topic is not None and kept.value is not None:
                try:
                    record = codec.decode(kept.value)
                except InvalidRecord:
                    record = None
                if record is not None and record.run_id == "demo":
                    values = [(kept.key, kept.value if other is record else codec.encode(other)) for other in edit(kept.topic, record)]
            for key, value in values:
                producer.produce(kept.physical, value, key, kept.partition, headers=kept.headers)
        producer.flush(_WAIT_S)
        return copy


def only(kind: type[Record], change: Callable[[Any], Iterable[Record]]) -> Edit:
    """An edit of the records of one kind."""
    return lambda _topic, record: change(record) if isinstance(record, kind) else (record,)


def of_earlier_release(topic: Topic, record: Record) -> Iterable[Record]:
    """An edit: reports that do not say what governed their step."""
    del topic
    return (replace(record, policy=None) if isinstance(record, StepReport) else record,)


def without_any_policy(topic: Topic, record: Record) -> Iterable[Record]:
    """An edit: neither reports nor `runs` say what governed the run."""
    return () if isinstance(record, Run) else of_earlier_release(topic, record)


def run_record(pipeline: Pipeline, run_id: str = "demo", **staleness: Any) -> Run:
    """What the pipeline's run is."""
    settings = pipeline.settings()
    config = public_config(settings)
    return Run(
        run_id=run_id,
        mode=Mode.ASYNCHRONOUS,
        task="t",
        model="m",
        seed=0,
        config=json.dumps({**config, "staleness": {**config["staleness"], **staleness}}),
        staleness_budget=settings.budget,
        publication_period=settings.publication_period,
        group_size=GROUP_SIZE,
        groups_per_step=GROUPS_PER_STEP,
        created_ms=1,
    )


def request_of(seq: int, **changes: Any) -> RolloutRequest:
    """The feeder's, of asynchronous mode."""
    fields: dict[str, Any] = {
        "run_id": "demo",
        "group_id": group_id_of("demo", seq),
        "seq": seq,
        "purpose": Purpose.TRAIN,
        "task": "t",
        "prompt_token_ids": b"\x01\x00\x00\x00",
        "group_size": GROUP_SIZE,
        "sampling": Sampling(max_new_tokens=2),
        "required_version": 0,
        "learner_version": 0,
        "issued_ms": 1,
    }
    return RolloutRequest(**{**fields, **changes})


def make_sound_run(folder: Path) -> SoundRun:
    """Six steps in two sessions, with something of everything that an audit must understand."""
    pipeline = Pipeline(folder / "run", options={"rollout": {"probe_size": GROUP_SIZE}, "offline": {"episodes": "hands.jsonl"}})
    pipeline.write(RUNS, run_record(pipeline))
    first = NumpyTrainer()
    shas = {0: first.snapshot_sha256}

    def group(seq: int, version: int, **changes: Any) -> None:
        pipeline.write(REQUESTS, request_of(seq), partition=0)
        pipeline.write_group(seq, version=version, weights_sha256=shas[version], **changes)

    for seq in range(2 * GROUPS_PER_STEP):
        group(seq, 0)
    # A redelivered request makes another attempt; whoever comes second is left over.
    pipeline.write_group(1, attempt="again", weights_sha256=shas[0])
    pipeline.write_bytes(TRAJECTORIES, b"\x00no record")
    pipeline.write(TRAJECTORIES, *(sample(0, index, purpose=Purpose.PROBE, weights_sha256=shas[0]) for index in range(GROUP_SIZE)))
    pipeline.write(TRAJECTORIES, sample(0, 0, purpose=Purpose.EVAL, weights_sha256=shas[0]), sample(3, 0, run_id="other"))
    pipeline.train(first, steps=2)
    for manifest in pipeline.manifests():
        shas[manifest.version] = manifest.sha256
    for seq in range(2 * GROUPS_PER_STEP, 5 * GROUPS_PER_STEP):
        group(seq, 2)
    offline: dict[str, Any] = {
        "source": TrajectorySource.OFFLINE,
        "logprob_source": LogprobSource.RECOMPUTED,
        "logprobs": pack_logprobs([0.0, 0.0]),
        "task": pipeline.settings().task.name,
    }
    pipeline.write(REQUESTS, request_of(10), partition=0)
    pipeline.write_group(10, version=0, **{**offline, "weights_sha256": ""})
    pipeline.train(NumpyTrainer(), steps=4, takeover=True)
    for manifest in pipeline.manifests():
        shas[manifest.version] = manifest.sha256
    # Too old by the time that it comes.
    group(11, 0)
    group(12, 4)
    group(13, 4)
    pipeline.train(NumpyTrainer(), steps=STEPS_TRAINED, takeover=True)
    # Nobody has read these.
    group(14, 4)
    pipeline.write(STEPS, replace(pipeline.reports()[0], run_id="other"), partition=0)
    return SoundRun(pipeline, tuple(everything(pipeline)))


def everything(pipeline: Pipeline) -> Iterable[Kept]:
    """Every committed message of the namespace, topic after topic."""
    logical = {pipeline.namespace.topic(topic): topic for topic in TOPICS}
    names = [name for name in pipeline.cluster.admin().list_topics(timeout=_WAIT_S).topics if name.startswith(pipeline.namespace.name)]
    consumer = pipeline.cluster.consumer({"group.id": "copy", "enable.partition.eof": True, "isolation.level": "read_committed"})
    for name in sorted(names):
        partitions = consumer.list_topics(name, timeout=_WAIT_S).topics[name].partitions
        consumer.assign([TopicPartition(name, number, OFFSET_BEGINNING) for number in partitions])
        ends = 0
        while ends < len(partitions):
            raw = consumer.poll(_WAIT_S)
            assert raw is not None, f"waited for the end of {name}"
            if raw.error() is not None:
                ends += 1
                continue
            partition = raw.partition()
            assert partition is not None
            yield Kept(logical.get(name), name, partition, raw.key(), raw.value(), list(raw.headers() or ()))
    consumer.close()
