"""A real feeder over the in-memory cluster, workers of different speeds beside it, and a clock that the test moves.

The workers are played: each takes what is in its partitions, works on some groups at once, commits as the consumer loop does, and says what
it does. Whoever dies is noticed by the group after `SESSION_S`; what it had in hand is delivered again to those who get its partitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import NewTopic
from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.clock import ManualClock
from echo_bus.requests.dispatch import WORKERS_GROUP
from echo_core.capacity.estimates import Speed
from echo_memory import MemoryCluster
from echo_rollout.feeder import Feeder
from echo_rollout.metrics import FeederMetrics
from echo_runtime.notices import Notices
from echo_runtime.places import PlaceTimes
from echo_schemas.codec import lock_file_codec
from echo_schemas.columns import pack_seqs
from echo_schemas.naming import Namespace
from echo_schemas.records import Progress, RolloutRequest, WeightManifest, WorkerState, WorkerStatus
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import REQUESTS, WEIGHTS, weights_key
from echo_settings import Settings
from echo_settings.rules import staleness_policy
from tests.examples import load_examples
from tests.unit.rollout.swarm import RUN, LetterCodec, LetterTask

pytestmark = pytest.mark.slow

NUM_PARTITIONS = 12
GROUP_SIZE, GROUPS_PER_STEP = 4, 48
TICK_S, COMMIT_S, SESSION_S = 0.1, 0.2, 10.0
# Times are sums of ticks.
NEARLY_S = 1e-6
Place = tuple[int, int]


class PlayedView:
    """A compacted topic as the test says it is."""

    def __init__(self, **entries: Any) -> None:
        self.entries: dict[str, Any] = entries
        self._listeners: list[Any] = []

    def get(self, key: str) -> Any:
        return self.entries.get(key)

    def items(self) -> dict[str, Any]:
        return dict(self.entries)

    def on_change(self, listener: Any) -> None:
        self._listeners.append(listener)

    def put(self, key: str, record: Any) -> None:
        self.entries[key] = record
        for listener in self._listeners:
            listener(key, record)


@dataclass
class PlayedWorker:
    """Works on `slots` groups at once, each for `seconds`."""

    name: str
    seconds: float
    slots: int
    capacity: int = 32
    partitions: tuple[int, ...] = ()
    waiting: list[Place] = field(default_factory=list)
    working: dict[Place, float] = field(default_factory=dict)
    done: int = 0
    rollouts: int = 0
    said_s: float = -1.0
    alive: bool = True
    speed: Speed = field(default_factory=Speed)
    ages_s: list[float] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        return self.slots / self.seconds


class Pool:
    """The run. `advance` lets time go by."""

    def __init__(self, stack: ExitStack, **rollout: Any) -> None:
        self.clock = ManualClock()
        self.cluster = MemoryCluster()
        namespace = Namespace("test.pool")
        topics = [
            NewTopic(f"{namespace.name}.{spec.name}", NUM_PARTITIONS if spec.name == "requests" else 1, 1) for spec in load_topic_specs()
        ]
        for future in self.cluster.admin().create_topics(topics).values():
            future.result(5)
        self.codec = lock_file_codec()
        bus = Bus(
            cluster=self.cluster, namespace=namespace, codec=self.codec, clock=self.clock, role="t", run_id=RUN
        )  # fmt: skip
        self.settings = Settings.model_validate(
            {
                "run": {"name": RUN},
                "rollout": {"group_size": GROUP_SIZE, "probe_size": 0, "depth": 2, **rollout},
                "learner": {"groups_per_step": GROUPS_PER_STEP},
                "staleness": {"budget": 3, "publication_period": 1},
            }
        )
        manifest = next(record for record in load_examples(WEIGHTS).values() if isinstance(record, WeightManifest))
        self.progress = PlayedView()
        self.workers_view = PlayedView()
        weights = PlayedView(**{weights_key(RUN, None): replace(manifest, run_id=RUN, version=0, next_seq=0)})
        observer = stack.enter_context(closing(bus.observer()))
        writer = stack.enter_context(closing(bus.transactions("feeder")))
        registry = CollectorRegistry()
        parts: dict[str, Any] = {
            "settings": self.settings,
            "policy": staleness_policy(self.settings),
            "task": LetterTask(),
            "prompts": LetterCodec(),
            "bus": bus,
            "writer": writer,
            "observer": observer,
            "progress": self.progress,
            "weights": weights,
            "workers": self.workers_view,
            "control": PlayedView(),
            "places": PlaceTimes(registry, self.clock),
            "notices": Notices(self.clock),
            "metrics": FeederMetrics(registry),
            "clock": self.clock,
        }
        self.feeder = Feeder(**parts)
        self.physical = namespace.topic(REQUESTS)
        self.reader = self.cluster.consumer(
            {"group.id": namespace.group(WORKERS_GROUP), "client.id": "w", "isolation.level": "read_committed"}
        )
        stack.callback(self.reader.close)
        self.reader.assign([TopicPartition(self.physical, partition, 0) for partition in range(NUM_PARTITIONS)])
        self.workers: list[PlayedWorker] = []
        self.issued_s: dict[Place, float] = {}
        self.open: dict[int, list[int]] = {partition: [] for partition in range(NUM_PARTITIONS)}
        self.finished: Counter[Place] = Counter()
        self.seqs: dict[Place, int] = {}
        self.resent: list[int] = []
        self.in_log: list[int] = []
        self.trained: set[int] = set()
        self.step_s = 0.0
        self._trained_s = 0.0
        self._said_s = 0.0
        self.num_done = 0
        self._version = 0
        self._say_progress()

    def join(self, *workers: PlayedWorker) -> None:
        """They get partitions, and those whose were taken keep what they have in hand, as the consumer loop does."""
        self.workers += workers
        self._assign()

    def kill(self, worker: PlayedWorker) -> None:
        """No farewell; the group notices later."""
        worker.alive = False

    def bury(self, worker: PlayedWorker) -> None:
        """The group has noticed."""
        self.workers.remove(worker)
        self._assign()

    def advance(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self._tick()

    def _assign(self) -> None:
        alive = [worker for worker in self.workers if worker.alive]
        before = {partition: worker for worker in self.workers for partition in worker.partitions}
        for index, worker in enumerate(alive):
            worker.partitions = tuple(range(index, NUM_PARTITIONS, len(alive)))
            for partition in worker.partitions:
                if before.get(partition) is not worker:
                    # From the committed offset on, so also what the one before has in hand.
                    worker.waiting += [(partition, offset) for offset in self.open[partition]]
            self._say(worker)
        for worker in alive:
            worker.waiting = [place for place in worker.waiting if place[0] in worker.partitions]

    def _tick(self) -> None:
        self.clock.advance(TICK_S)
        now_s = self.clock.monotonic_s()
        while self.feeder.advance() is None:
            pass
        while (message := self.reader.poll(0)) is not None:
            place = (message.partition() or 0, message.offset() or 0)
            self.issued_s[place] = now_s
            request = self.codec.decode(message.value() or b"")
            assert isinstance(request, RolloutRequest)
            self.seqs[place] = request.seq
            self.resent += [request.seq] if request.resends else []
            self.open[place[0]].append(place[1])
            next(worker for worker in self.workers if place[0] in worker.partitions).waiting.append(place)
        for worker in self.workers:
            if worker.alive:
                self._work(worker, now_s)
        if round(now_s / TICK_S) % round(COMMIT_S / TICK_S) == 0:
            self._commit()

    def _work(self, worker: PlayedWorker, now_s: float) -> None:
        samples = 0
        for place in [place for place, ends_s in worker.working.items() if ends_s <= now_s + NEARLY_S]:
            del worker.working[place]
            worker.done += 1
            samples += GROUP_SIZE
            worker.ages_s.append(now_s - self.issued_s[place])
            self.finished[place] += 1
            self.in_log.append(self.seqs[place])
            if place[1] in self.open[place[0]]:
                self.num_done += 1
        while worker.waiting and len(worker.working) < worker.slots:
            worker.working[worker.waiting.pop(0)] = now_s + worker.seconds
        worker.speed.add(busy_s=TICK_S if worker.working or samples else 0.0, samples=samples, tokens=0)
        worker.rollouts += samples
        if now_s - worker.said_s >= 1.0:
            self._say(worker)

    def _say(self, worker: PlayedWorker) -> None:
        worker.said_s = self.clock.monotonic_s()
        status = WorkerStatus(
            run_id=RUN,
            worker_id=worker.name,
            host="h",
            engine="played",
            state=WorkerState.READY,
            installed_version=0,
            weights_sha256="0" * 64,
            rollouts_per_s=worker.speed.samples_per_s,
            partitions=worker.partitions,
            capacity=worker.capacity,
            rollouts=worker.rollouts,
            time_ms=self.clock.time_ms(),
        )
        self.workers_view.put(worker.name, status)

    def _commit(self) -> None:
        """The contiguous part of each partition; and the learner trains what is there."""
        moved = []
        for partition, offsets in self.open.items():
            num_done = next((index for index, offset in enumerate(offsets) if not self.finished[(partition, offset)]), len(offsets))
            if num_done:
                moved.append(TopicPartition(self.physical, partition, offsets[num_done - 1] + 1))
                del offsets[:num_done]
        if moved:
            self.reader.commit(offsets=moved, asynchronous=False)
        now_s = self.clock.monotonic_s()
        ready = [seq for seq in dict.fromkeys(self.in_log) if seq not in self.trained]
        if len(ready) >= GROUPS_PER_STEP and now_s - self._trained_s >= self.step_s - NEARLY_S:
            self._trained_s = now_s
            self.trained |= set(ready[:GROUPS_PER_STEP])
            self._version += 1
            self._say_progress()
        elif now_s - self._said_s >= 1.0:
            self._say_progress()

    def _say_progress(self) -> None:
        progress = Progress(
            run_id=RUN,
            session="s",
            version=self._version,
            published=self._version,
            groups_trained=self._version * GROUPS_PER_STEP,
            groups_dropped=0,
            groups_ready=0,
            next_seq=0,
            closed=pack_seqs(0, self.trained),
            seen=pack_seqs(0, self.in_log),
            clock_s=self.clock.monotonic_s(),
            read_s=self.clock.monotonic_s(),
            time_ms=self.clock.time_ms(),
        )
        self._said_s = self.clock.monotonic_s()
        self.progress.put(RUN, progress)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(stack)


def rates_over(pool: Pool, seconds: float) -> dict[str, float]:
    """Groups per second of each worker over the next seconds; ages are those of these seconds."""
    before = {worker.name: worker.done for worker in pool.workers}
    for worker in pool.workers:
        worker.ages_s.clear()
    pool.advance(seconds)
    return {worker.name: (worker.done - before.get(worker.name, 0)) / seconds for worker in pool.workers}


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        # As many at once, each five times as long: another device.
        ((0.4, 8), (2.0, 8)),
        # One after the other: another number of cores.
        ((0.2, 2), (1.0, 2)),
        # One group takes as long as several steps.
        ((0.2, 2), (10.0, 1)),
    ],
)
def test_each_worker_does_what_it_could_do_alone_and_a_slow_ones_work_is_not_old(
    pool: Pool, fast: tuple[float, int], slow: tuple[float, int]
) -> None:
    workers = [PlayedWorker("fast", *fast), PlayedWorker("slow", *slow)]
    pool.join(*workers)
    pool.advance(20)
    rates = rates_over(pool, 20)
    together, apart = sum(rates.values()), sum(worker.per_s for worker in workers)
    assert together >= 0.9 * apart, rates
    assert rates["slow"] >= 0.8 * workers[1].per_s, rates
    step_s = GROUPS_PER_STEP / together
    for worker in workers:
        # The budget is three steps: most of it, and what the worker needs for a group or two in any case.
        assert max(worker.ages_s) <= 0.75 * 3 * step_s + 2 * worker.seconds + 1.0, worker.name
    assert max(pool.finished.values()) == 1


def test_a_third_worker_that_joins_late_gets_its_part(pool: Pool) -> None:
    pool.join(PlayedWorker("fast", 0.4, 8), PlayedWorker("slow", 2.0, 8))
    pool.advance(20)
    third = PlayedWorker("third", 0.8, 8)
    pool.join(third)
    pool.advance(20)
    rates = rates_over(pool, 20)
    assert rates["third"] >= 0.8 * third.per_s, rates
    assert rates["slow"] >= 0.7 * 4.0, rates


def test_what_a_slow_worker_had_in_hand_when_it_died_is_done_by_the_others_and_it_gets_nothing_more(pool: Pool) -> None:
    slow = PlayedWorker("slow", 2.0, 8)
    pool.join(PlayedWorker("fast", 0.4, 8), slow)
    pool.advance(20)
    pool.kill(slow)
    in_hand = {*slow.waiting, *slow.working}
    assert in_hand
    pool.advance(6)
    owned = {place for place in pool.issued_s if place[0] in slow.partitions}
    pool.advance(SESSION_S - 6)
    # Nothing was handed to the dead one once it had been silent for five seconds.
    assert {place for place in pool.issued_s if place[0] in slow.partitions} == owned
    pool.bury(slow)
    pool.advance(20)
    assert all(pool.finished[place] for place in in_hand)
    assert all(len(offsets) <= 8 for offsets in pool.open.values())


def test_a_worker_that_stands_still_holds_a_bounded_part_and_the_other_goes_on(pool: Pool) -> None:
    stuck = PlayedWorker("stuck", 1e9, 8)
    pool.join(PlayedWorker("fast", 0.4, 8), stuck)
    pool.advance(20)
    assert len(stuck.waiting) + len(stuck.working) <= 4
    assert rates_over(pool, 20)["fast"] >= 0.9 * 20


def test_steps_of_half_an_hour_and_answers_of_minutes_make_nobody_ask_again() -> None:
    """ECHO-2's proportions at a fiftieth of the time: steps of 32 s, and a time-out of 12 s, that of 600."""
    with ExitStack() as stack:
        pool = Pool(stack, request_timeout_s=12.0)
        pool.step_s = 32.0
        pool.join(PlayedWorker("fast", 4.0, 8), PlayedWorker("slow", 15.0, 4))
        pool.advance(130)
        assert len(pool.trained) >= 3 * GROUPS_PER_STEP
        assert pool.resent == []
        assert max(pool.finished.values()) == 1


def test_what_a_stuck_worker_holds_is_asked_of_the_others_once_it_is_clear_that_it_is_stuck() -> None:
    with ExitStack() as stack:
        pool = Pool(stack, request_timeout_s=5.0)
        stuck = PlayedWorker("stuck", 1e9, 8)
        pool.join(PlayedWorker("fast", 0.4, 8), stuck)
        pool.advance(40)
        held = {pool.seqs[place] for place in [*stuck.waiting, *stuck.working]}
        assert held
        assert set(pool.resent) <= held
        assert held & set(pool.resent) <= pool.trained
        assert pool.resent
