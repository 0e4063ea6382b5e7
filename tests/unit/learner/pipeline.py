"""A learner's surroundings in memory: a cluster with all topics, groups to train, and what became of them.

Imports torch by way of the learner's types, and trains nothing with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from confluent_kafka import OFFSET_BEGINNING, TopicPartition
from confluent_kafka.admin import NewTopic
from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.client.publisher import Publisher
from echo_bus.clock import Clock, Deadline, SystemClock
from echo_bus.requests.request_reply import CORRELATION_ID
from echo_bus.signatures import Signer, Verifier
from echo_bus.tracing import Tracer
from echo_bus.wire import Wire
from echo_learner.commit.checkpoint import CheckpointStore
from echo_learner.metrics import LearnerMetrics
from echo_learner.run import train_in_sessions
from echo_learner.start.beginning import StartOptions
from echo_memory import MemoryCluster
from echo_runtime.places import PlaceTimes
from echo_runtime.process import RoleProcess, StopSignal
from echo_schemas.codec import lock_file_codec
from echo_schemas.columns import OFFSET_DTYPE, TOKEN_DTYPE, pack_tokens
from echo_schemas.headers import RUN
from echo_schemas.naming import Namespace
from echo_schemas.records import ChatMessage, Coordinates, Drop, Record, Reward, RolloutReply, StepReport, Trajectory, WeightManifest
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import DROPS, REPLIES, REQUESTS, REWARDS, STEPS, TRAJECTORIES, WEIGHTS, Topic
from echo_settings import Settings
from echo_tasks.task import Prompt, SingleTurn
from tests.unit.core.records import reward, trajectory
from tests.unit.learner.crash_point import CrashPoint
from tests.unit.learner.numpy_trainer import VOCABULARY, NumpyTrainer

WAIT_S = 60.0
_LOOK_S = 0.005
NUM_PARTITIONS = 2
GROUP_SIZE = 2
GROUPS_PER_STEP = 2
NUM_ISSUED = 256
"""Seqs that no test reaches."""
FIRST_WEIGHTS = NumpyTrainer().snapshot_sha256
"""What an ordinary learner publishes as version 0."""

R = TypeVar("R", bound=Record)


class AnyTask(SingleTurn):
    """What `sample` answers: the prompt of a seq is its number."""

    name = "t"
    rewards: Sequence[str] = ("exact",)

    def prompt(self, seed: int, seq: int) -> Prompt:
        del seed
        return Prompt(text=str(seq))


class NumberCodec:
    """One token for a number, and one text for every token."""

    def __init__(self, vocabulary: int = VOCABULARY) -> None:
        self._vocabulary = vocabulary

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        return np.array([int(text) % self._vocabulary], np.int32)

    def decode(self, token_ids: Sequence[int] | npt.NDArray[np.int32]) -> str:
        del token_ids
        return "p"

    def render(self, messages: Sequence[ChatMessage]) -> str:
        raise NotImplementedError

    def render_reply(self, content: str) -> str:
        raise NotImplementedError


def sample(seq: int, index: int, **changes: Any) -> Trajectory:
    """Member `index` of group `seq`: two generated tokens, and a prompt that tells it from every other group. Of the first weights."""
    fields: dict[str, Any] = {
        "token_ids": pack_tokens([seq % VOCABULARY, index, seq // VOCABULARY % VOCABULARY]),
        "weights_sha256": FIRST_WEIGHTS,
    }
    return trajectory(seq, index, **{**fields, **changes})


@dataclass
class Accounts:
    """What the log and the newest checkpoint say of each trajectory record."""

    trained: list[Coordinates]
    dropped: dict[Coordinates, list[str]]
    seqs_dropped: dict[int, list[str]]
    everything: set[Coordinates]

    @property
    def open(self) -> set[Coordinates]:
        """Neither trained nor dropped."""
        return self.everything - set(self.trained) - set(self.dropped)

    def assert_each_once(self) -> None:
        """No record has two fates, and none has the same one twice."""
        assert len(self.trained) == len(set(self.trained)), "a record was trained twice"
        assert not set(self.trained) & set(self.dropped), "a record was trained and dropped"
        assert all(len(reasons) == 1 for reasons in self.dropped.values()), f"a record was dropped twice: {self.dropped}"
        assert all(len(reasons) == 1 for reasons in self.seqs_dropped.values()), f"a seq was dropped twice: {self.seqs_dropped}"
        assert {*self.trained, *self.dropped} <= self.everything, "the log knows a record that nobody wrote"


@dataclass
class Pipeline:
    """One namespace in memory and the folder of one run's checkpoints. Its learner runs in the caller's thread unless it is `started`."""

    folder: Path
    cluster: MemoryCluster = field(default_factory=MemoryCluster)
    namespace: Namespace = field(default_factory=lambda: Namespace("echo.test"))
    options: dict[str, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=SystemClock)
    signer: Signer | None = None
    verifier: Verifier | None = None
    tracer: Tracer | None = None
    _publisher: Publisher = field(init=False)

    def __post_init__(self) -> None:
        self._publisher = Publisher(
            self.cluster.producer({"partitioner": "murmur2_random"}),
            Wire(namespace=self.namespace, role="test", signer=self.signer, tracer=self.tracer),
            poll=False,
        )
        admin = self.cluster.admin()
        if any(name.startswith(f"{self.namespace.name}.") for name in admin.list_topics().topics):
            return
        wanted = [NewTopic(f"{self.namespace.name}.{spec.name}", min(spec.partitions, NUM_PARTITIONS), 1) for spec in load_topic_specs()]
        for future in admin.create_topics(wanted).values():
            future.result(WAIT_S)
        # A feeder that lets everything in would have written as many: a seq that was never issued is refused.
        for _ in range(NUM_ISSUED):
            self._publisher.publish_bytes(self.namespace.topic(REQUESTS), b"", headers=[(RUN, b"other")], partition=NUM_PARTITIONS - 1)

    # Who is there

    def settings(self, **sections: dict[str, Any]) -> Settings:
        """Two groups of two a step, S = 3, kappa = 1, ten steps; `sections` on top."""
        content: dict[str, Any] = {
            "kafka": {"namespace": self.namespace.name},
            "task": {"name": "tests.unit.learner.pipeline:AnyTask"},
            "rollout": {"group_size": GROUP_SIZE, "probe_size": 0},
            "learner": {"groups_per_step": GROUPS_PER_STEP, "steps": 10},
            "staleness": {"budget": 3, "publication_period": 1, "admission": "free"},
            "checkpoint": {"folder": str(self.folder)},
        }
        for given in (self.options, sections):
            for section, values in given.items():
                content[section] = {**content.get(section, {}), **values} if isinstance(values, dict) else values
        return Settings.model_validate(content)

    @property
    def bus(self) -> Bus:
        """A bus of the run `demo`."""
        return self._bus("demo")

    def _bus(self, run_id: str | None) -> Bus:
        return Bus(
            cluster=self.cluster,
            namespace=self.namespace,
            role="learner",
            run_id=run_id,
            verifier=self.verifier,
            tracer=self.tracer,
        )

    def process(self, **sections: dict[str, Any]) -> RoleProcess:
        """A learner's process under the settings; its bus keeps the system's clock."""
        settings, registry, clock = self.settings(**sections), CollectorRegistry(), self.clock
        return RoleProcess(
            settings=settings,
            bus=self._bus(settings.run.name),
            registry=registry,
            places=PlaceTimes(registry, clock),
            clock=clock,
            stop=StopSignal(),
        )

    def train(
        self, trainer: NumpyTrainer, *, steps: int, takeover: bool = False, skip: bool = False, **sections: dict[str, Any]
    ) -> LearnerMetrics:
        """Run a learner to version `steps`."""
        process = self.process(**{**sections, "learner": {**sections.get("learner", {}), "steps": steps}})
        metrics = LearnerMetrics(process.registry)
        train_in_sessions(process, trainer, metrics, NumberCodec(), StartOptions(takeover=takeover, skip=skip))
        return metrics

    def start(self, trainer: NumpyTrainer, *, takeover: bool = False, skip: bool = False, **sections: dict[str, Any]) -> Running:
        """Run a learner in a thread of its own."""
        return Running(self.process(**sections), trainer, takeover=takeover, skip=skip)

    # What is written

    def write(self, topic: Topic, *records: Record, partition: int | None = None) -> list[Coordinates]:
        """Publish records; where they lie."""
        receipts = [self._publisher.publish(topic, record, partition=partition) for record in records]
        self._publisher.flush(WAIT_S)
        return [receipt.wait(WAIT_S) for receipt in receipts]

    def write_group(self, seq: int, *, version: int = 0, values: Sequence[float | None] = (0.0, 1.0), **changes: Any) -> list[Coordinates]:
        """One attempt of a group, of tokens that no other group has, and its rewards (None: no reward for that member)."""
        members = [self.sample(seq, index, version=version, **changes) for index in range(GROUP_SIZE)]
        places = self.write(TRAJECTORIES, *members)
        for member, where, value in zip(members, places, values, strict=True):
            if value is not None:
                self.write_reward(member, where, value)
        return places

    def sample(self, seq: int, index: int, *, version: int = 0, **changes: Any) -> Trajectory:
        """As `sample`, of the weights that are published as `version`."""
        shas = {manifest.version: manifest.sha256 for manifest in self.manifests()}
        return sample(seq, index, version=version, **{"weights_sha256": shas.get(version, FIRST_WEIGHTS), **changes})

    def write_reward(self, member: Trajectory, where: Coordinates, value: float | None, **changes: Any) -> None:
        """A reward beside its trajectory; without a value, one that failed."""
        judged: Reward = reward(where, member.seq, value=value, index=member.index, attempt=member.attempt, **changes)
        self.write(REWARDS, replace(judged, run_id=member.run_id, group_id=member.group_id), partition=where.partition)

    def write_reply(self, reply: RolloutReply, partition: int) -> None:
        """A worker's receipt, with the header that names what it answers."""
        headers = ((CORRELATION_ID, reply.correlation.encode()),)
        self._publisher.publish(REPLIES, reply, partition=partition, headers=headers)
        self._publisher.flush(WAIT_S)

    def write_bytes(self, topic: Topic, value: bytes) -> None:
        """Publish what is no record."""
        self._publisher.publish_bytes(self.namespace.topic(topic), value, partition=0)
        self._publisher.flush(WAIT_S)

    # What is read

    def read(self, topic: Topic, kind: type[R]) -> list[R]:
        """Every committed record of one kind, in log order."""
        return [record for _, record in self.placed(topic, kind)]

    def placed(self, topic: Topic, kind: type[R], *, every_run: bool = False) -> list[tuple[Coordinates, R]]:
        """The same with coordinates, of the run `demo` or of every run."""
        with closing(self._bus(None if every_run else "demo").reader([topic])) as reader:
            reader.start()
            messages = [message for batch in reader.read_to_end(Deadline.after(WAIT_S)) for message in batch]
        return [(message.coordinates, message.record) for message in messages if isinstance(message.record, kind)]

    def dead_letters(self, topic: Topic) -> list[bytes | None]:
        """The original bytes of what nobody could read."""
        consumer = self.cluster.consumer({"group.id": "test", "auto.offset.reset": "earliest", "enable.partition.eof": True})
        with closing(consumer):
            physical = self.namespace.dead_letters(topic)
            partitions = consumer.list_topics(physical, timeout=WAIT_S).topics[physical].partitions
            consumer.assign([TopicPartition(physical, partition, OFFSET_BEGINNING) for partition in partitions])
            values: list[bytes | None] = []
            num_ends = 0
            while num_ends < len(partitions):
                message = consumer.poll(WAIT_S)
                assert message is not None, f"waited for the end of {physical}"
                num_ends += message.error() is not None
                values += [message.value()] if message.error() is None else []
        return values

    def wait_for_manifest(self, version: int) -> WeightManifest:
        """The manifest of a version, once it is public."""
        return self.wait_for(WEIGHTS, WeightManifest, lambda manifest: manifest.version == version, f"version {version} to be public")

    def reports(self) -> list[StepReport]:
        """The public steps."""
        return self.read(STEPS, StepReport)

    def drops(self) -> list[Drop]:
        """The public drops."""
        return self.read(DROPS, Drop)

    def manifests(self) -> list[WeightManifest]:
        """Every published snapshot under its own key, in the order of publication; a manifest stands twice on the log."""
        return self.read(WEIGHTS, WeightManifest)[::2]

    def blob(self, manifest: WeightManifest) -> bytes:
        """The bytes that a manifest names."""
        assert manifest.blob is not None
        return self.bus.blob_reader().read(manifest.blob, manifest.run_id)

    def wait_for(self, topic: Topic, kind: type[R], predicate: Callable[[R], bool], what: str) -> R:
        """The first record of `kind` that satisfies `predicate`, which may come yet."""
        deadline = Deadline.after(WAIT_S)
        with closing(self.bus.reader([topic])) as reader:
            reader.start()
            while not deadline.expired():
                for message in reader.read(timeout_s=0.2):
                    if isinstance(message.record, kind) and predicate(message.record):
                        return message.record
        raise AssertionError(f"waited for {what}")

    def crash_at(self, number: int, matches: Callable[[str], bool]) -> CrashPoint:
        """The `number`-th call from now on of a client operation that `matches` ends the process."""
        point = self.cluster.faults.before = CrashPoint(number, matches)
        return point

    def restart(self) -> None:
        """The broker works again."""
        self.cluster.faults.before = None

    # What has become of it

    @property
    def store(self) -> CheckpointStore:
        """The run's checkpoints."""
        return CheckpointStore(self.folder / "checkpoints", lock_file_codec())

    def accounts(self) -> Accounts:
        """The books."""
        trained = [
            Coordinates(partition=int(partition), offset=int(offset))
            for report in self.reports()
            if report.batch is not None
            for partition, offset in zip(
                np.frombuffer(report.batch.partitions, TOKEN_DTYPE), np.frombuffer(report.batch.offsets, OFFSET_DTYPE), strict=True
            )
        ]
        dropped: dict[Coordinates, list[str]] = {}
        seqs: dict[int, list[str]] = {}
        for drop in self.drops():
            if drop.what is None:
                seqs.setdefault(drop.seq, []).append(drop.why.value)
            else:
                dropped.setdefault(drop.what, []).append(drop.why.value)
        everything = {where for where, _ in self.placed(TRAJECTORIES, Trajectory)}
        return Accounts(trained=trained, dropped=dropped, seqs_dropped=seqs, everything=everything)


def fill(pipeline: Pipeline, steps: int, *, start: int = 0, version: int = 0) -> None:
    """Groups for steps `start` to `steps`, all sampled by `version`."""
    for seq in range(start * GROUPS_PER_STEP, steps * GROUPS_PER_STEP):
        pipeline.write_group(seq, version=version)


def assert_books(pipeline: Pipeline, *, num_open: int = 0) -> None:
    """Every record has one fate at most, and those without one can still be read by whoever resumes."""
    accounts = pipeline.accounts()
    accounts.assert_each_once()
    assert len(accounts.open) == num_open
    newest = max((pipeline.store.load(name) for name in pipeline.store.ids()), key=lambda state: (state.version, state.created_ms))
    assert all(where.offset >= newest.assembly.trajectory_lows.get(where.partition, 0) for where in accounts.open)


class Running:
    """A learner in a thread. `stop` drains it and raises what it raised."""

    def __init__(self, process: RoleProcess, trainer: NumpyTrainer, *, takeover: bool, skip: bool = False) -> None:
        self.process = process
        self.trainer = trainer
        self.metrics = LearnerMetrics(process.registry)
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(takeover, skip), name="learner")
        self._thread.start()

    def _run(self, takeover: bool, skip: bool) -> None:
        try:
            train_in_sessions(self.process, self.trainer, self.metrics, NumberCodec(), StartOptions(takeover=takeover, skip=skip))
        except BaseException as exc:  # the edge of the thread: the test looks at it
            self.error = exc

    def value(self, metric: str, **labels: str) -> float:
        """A metric of its registry; 0 if it was never touched."""
        return self.process.registry.get_sample_value(metric, labels) or 0.0

    def wait_for_value(self, metric: str, value: float) -> None:
        """Wait until a metric has the value."""
        self.wait_until(lambda: self.value(metric) == value, f"{metric} is {value:g}")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait until `condition()` holds. Raises what the learner raised."""
        deadline = Deadline.after(WAIT_S)
        while not condition():
            if self.error is not None:
                raise self.error
            assert not deadline.expired(), f"waited until {what}"
            self.process.stop.wait(_LOOK_S)

    def join(self) -> None:
        """Wait for its end. Raises what it raised."""
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive(), "waited for the learner to end"
        if self.error is not None:
            raise self.error

    def stop(self) -> None:
        """Drain it."""
        self.process.stop.set()
        self.join()

    def end(self) -> None:
        """Stop it whatever it raises: the test has looked at what it wanted to see."""
        self.process.stop.set()
        self._thread.join(WAIT_S)
