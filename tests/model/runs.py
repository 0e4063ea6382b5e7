"""One run under the model: its cluster, its disk, its learners, what may befall them, and what must hold whenever one of them starts."""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from prometheus_client import CollectorRegistry

from echo_bus.bus import Bus
from echo_bus.clock import SystemClock
from echo_bus.metrics import BusMetrics
from echo_learner.commit.learner_state import LearnerState
from echo_learner.commit.snapshot import file_names
from echo_learner.metrics import LearnerMetrics
from echo_learner.run import train_in_sessions
from echo_learner.start.beginning import StartOptions
from echo_memory import MemoryCluster
from echo_runtime.places import PlaceTimes
from echo_runtime.process import RoleProcess, StopSignal
from echo_schemas.codec import lock_file_codec
from echo_schemas.errors import EchoError, InvalidRecord
from echo_schemas.records import Chunk, Coordinates, Drop, Record, Reward, SessionClaim, StepReport, Trajectory, WeightKind, WeightManifest
from echo_schemas.topics import DROPS, REWARDS, STEPS, TRAJECTORIES, WEIGHT_CHUNKS, WEIGHTS, Topic
from tests.model.disk import Disk, Loss, Mounted
from tests.model.invariants import Books, reopened, violations
from tests.model.primitives import World
from tests.model.simulation import Process, Simulation, Task
from tests.model.trainer import VOCABULARY, ModelTrainer
from tests.model.workers import Workers
from tests.unit.learner.pipeline import NumberCodec, Pipeline

R = TypeVar("R", bound=Record)

# Far more than any recovery takes: silence of the predecessor, time-outs of rewards, sequential deadlines.
_PATIENCE_S = 300.0
_CODEC = lock_file_codec()
_DECODED: dict[bytes, Record | None] = {}


# Metrics are made once: making them takes longer than a run.
_REGISTRY = CollectorRegistry()
_BUS_METRICS = BusMetrics(_REGISTRY)
_LEARNER_METRICS = LearnerMetrics(_REGISTRY)
_PLACES = PlaceTimes(_REGISTRY, SystemClock())


class _Pipeline(Pipeline):
    def _bus(self, run_id: str | None) -> Bus:
        return Bus(
            cluster=self.cluster,
            namespace=self.namespace,
            codec=_CODEC,
            metrics=_BUS_METRICS,
            role="learner",
            run_id=run_id,
        )


class Feeder(Protocol):
    """Writes records while learners run."""

    def run(self, run: ModelRun) -> None:
        """In a task of its own, until the simulation ends."""


class Fate(StrEnum):
    """What befalls a learner at one of its calls."""

    KILL = "killed"
    POWER = "killed, and the power with it"
    PAUSE = "paused"
    FENCE = "without its transactional producer, and nobody else has one"


@dataclass(frozen=True, slots=True)
class Fault:
    """`fate` at the `number`-th call, before it has an effect. `loss`, `seed`: what the power takes."""

    fate: Fate
    number: int
    loss: Loss = Loss.EVERYTHING
    seed: int = 0


@dataclass(eq=False)
class RunningLearner:
    """A learner's process."""

    process: Process
    fault: Fault | None
    task: Task = field(init=False)
    error: Exception | None = None

    @property
    def has_ended(self) -> bool:
        """By itself or by a fault."""
        return self.task.is_done

    @property
    def said(self) -> str:
        """Why it ended by itself before its steps were done."""
        return "" if self.error is None else str(self.error)


class ModelRun:
    """A run of `steps` steps that publishes every `kappa`. `seed`: any interleaving; None: the same one each time. `close` it."""

    def __init__(
        self,
        folder: Path,
        *,
        mode: str = "asynchronous",
        kappa: int = 1,
        steps: int = 3,
        seed: int | None = None,
        records: MemoryCluster | None = None,
        **sections: dict[str, Any],
    ) -> None:
        """`records`: a cluster whose topics and records this one begins with."""
        self.steps = steps
        self.simulation = World.simulation = Simulation(seed)
        self._chance = None if seed is None else random.Random(f"workers {seed}")
        self._disk_folder = Path(tempfile.mkdtemp(dir=folder))
        self.disk = Mounted.disk = Disk(self._disk_folder, self.simulation)
        self.mode = mode
        self._kappa, self._sections = kappa, sections
        self.pipeline = _Pipeline(self._disk_folder / "runs" / "demo", cluster=MemoryCluster() if records is None else records.copy())
        self.pipeline.cluster.faults.before = self.simulation.call
        self._learners: list[RunningLearner] = []
        self._known: LearnerState | None = None
        self._has_workers = False
        self._power_lost: Fault | None = None

    def close(self) -> None:
        """End everything."""
        Mounted.disk = None
        self.simulation.close()
        shutil.rmtree(self._disk_folder, ignore_errors=True)

    # Learners

    def feed(self, feeder: Feeder) -> None:
        """Let `feeder` write records beside the learners."""
        self.simulation.spawn(Process("feeder"), "feeder", lambda: feeder.run(self))

    def start(self, fault: Fault | None = None, *, mode: str | None = None, takeover: bool = False, skew_ms: int = 0) -> RunningLearner:
        """A learner in a process of its own, which meets `fault`."""
        mode = self.mode = mode or self.mode
        if mode == "sequential" and not self._has_workers:
            self._has_workers = True
            self.simulation.spawn(Process("workers"), "workers", Workers(self.pipeline, self._chance).run)
        name = f"learner {len(self._learners)}"
        process = Process(name, skew_ms=skew_ms)
        role = self._role(self._sections_of(mode))
        learner = RunningLearner(process, fault)
        if fault is not None:
            process.before_call = self._befalls(fault)

        def run() -> None:
            try:
                train_in_sessions(role, ModelTrainer(name), _LEARNER_METRICS, NumberCodec(VOCABULARY), StartOptions(takeover=takeover))
            except (EchoError, OSError) as exc:
                learner.error = exc

        learner.task = self.simulation.spawn(process, "learner", run)
        self._learners.append(learner)
        return learner

    def wait(self, learner: RunningLearner) -> None:
        """Until it has ended or is paused. A dead one's threads are gone then, and what the power took is gone."""
        until_s = self.simulation.now_s + _PATIENCE_S
        while not learner.has_ended and not learner.process.paused:
            assert self.simulation.now_s < until_s, f"{learner.process.name} got nowhere in {_PATIENCE_S:g} s"
            learner.task.joiners.append(self.simulation.driver)
            self.simulation.block(until_s - self.simulation.now_s, "a learner")
        if learner.process.dead:
            self.simulation.reap(learner.process)
        if self._power_lost is not None:
            fault, self._power_lost = self._power_lost, None
            for each in self._learners:
                self.simulation.reap(each.process)
            Mounted.disk = None
            self.disk.lose_power(fault.loss, fault.seed)
            Mounted.disk = self.disk

    def train(self, fault: Fault | None = None, **options: Any) -> RunningLearner:
        """`start`, `wait`, and look at the books."""
        learner = self.start(fault, **options)
        self.wait(learner)
        self.check()
        return learner

    def resume(self, learner: RunningLearner) -> None:
        """Wake a paused one, let it go on to its end, and look at the books."""
        learner.process.paused = False
        self.wait(learner)
        self.check()

    def wake_all(self) -> None:
        """Resume whoever is paused, all at once. Each finds that it has a successor, even if it has nothing to commit."""
        for learner in self._learners:
            learner.process.paused = False
        for learner in self._learners:
            self.wait(learner)
        self.check()

    def finish(self, mode: str | None = None) -> None:
        """Faults are over: the next learner has all steps in bounded time."""
        learner = self.train(mode=mode, takeover=True)
        assert learner.error is None, f"the last learner ended with {learner.said!r}"
        reports = self.books().reports
        assert len(reports) == self.steps, f"the last learner ended at version {len(reports)} of {self.steps}"

    def _role(self, sections: Mapping[str, Any]) -> RoleProcess:
        clock = SystemClock()
        settings = self.pipeline.settings(**sections)
        return RoleProcess(settings=settings, bus=self.pipeline.bus, registry=_REGISTRY, places=_PLACES, clock=clock, stop=StopSignal())

    def _befalls(self, fault: Fault) -> Callable[[Process, str], None]:
        def before_call(process: Process, operation: str) -> None:
            if len(process.calls) == fault.number:
                if fault.fate is Fate.FENCE:
                    self.pipeline.cluster.fence(self.pipeline.namespace.transactional_id("learner"))
                elif fault.fate is Fate.PAUSE:
                    process.paused = True
                    self.simulation.wake(self.simulation.driver)
                else:
                    self.simulation.kill(process)
                if fault.fate is Fate.POWER:
                    # All learners share a machine.
                    self._power_lost = fault
                    for learner in self._learners:
                        self.simulation.kill(learner.process)

        return before_call

    def _sections_of(self, mode: str) -> dict[str, Any]:
        kappa = self._kappa if mode == "asynchronous" else 1
        sections: dict[str, dict[str, Any]] = {
            "run": {"mode": mode},
            "learner": {"steps": self.steps},
            "staleness": {"budget": 9, "publication_period": kappa},
            "checkpoint": {"keep": 2},
            "rollout": {"request_timeout_s": 20.0},
            "scoring": {"deadline_s": 8.0},
        }
        return {name: {**sections.get(name, {}), **self._sections.get(name, {})} for name in {*sections, *self._sections}}

    # What has become of it

    def check(self) -> None:
        """Every promise holds at this moment. Raises AssertionError with the counter-examples."""
        books = self.books()
        found = violations(books)
        if self._known is not None and books.state is not None and (seqs := reopened(self._known, books.state)):
            found.append(f"closed seqs are open again: {sorted(seqs)}")
        self._known = books.state or self._known
        assert not found, "\n".join(found)

    def books(self) -> Books:
        """What is committed, decoded; each record once for all runs of the test process."""
        trajectories: dict[Coordinates, Trajectory] = {}
        dead: set[Coordinates] = set()
        for where, record in self._read(TRAJECTORIES):
            if isinstance(record, Trajectory) and record.run_id == "demo":
                trajectories[where] = record
            elif record is None:
                dead.add(where)
        manifests, reports = self.read(WEIGHTS, WeightManifest), self.read(STEPS, StepReport)
        state = self._tip(reports, manifests)
        return Books(
            trajectories=trajectories,
            dead_letters=frozenset(dead),
            refused=self._refused(),
            rewards=[(where, record) for where, record in self._read(REWARDS) if isinstance(record, Reward)],
            reports=reports,
            drops=self.read(DROPS, Drop),
            manifests=manifests,
            blobs=self._blobs(manifests),
            state=state,
            trained_to=None if state is None else self._trained_to(state),
        )

    def _refused(self) -> frozenset[Coordinates]:
        """Trajectories that are whole, and dead letters because nobody had asked for them when they were read."""
        cluster, namespace = self.pipeline.cluster, self.pipeline.namespace
        copies = {value for _, _, value in cluster.committed(namespace.dead_letters(TRAJECTORIES))}
        return frozenset(
            Coordinates(partition=partition, offset=offset)
            for partition, offset, value in cluster.committed(namespace.topic(TRAJECTORIES))
            if value in copies
        )

    def read(self, topic: Topic, kind: type[R]) -> list[R]:
        """Every committed record of one kind."""
        return [record for _, record in self._read(topic) if isinstance(record, kind)]

    def _read(self, topic: Topic) -> list[tuple[Coordinates, Record | None]]:
        found = []
        for partition, offset, value in self.pipeline.cluster.committed(self.pipeline.namespace.topic(topic)):
            if value is not None and value not in _DECODED:
                try:
                    _DECODED[value] = _CODEC.decode(value)
                except InvalidRecord:
                    _DECODED[value] = None
            found.append((Coordinates(partition=partition, offset=offset), _DECODED.get(value or b"")))
        return found

    def _blobs(self, manifests: list[WeightManifest]) -> dict[tuple[int, str], bytes]:
        chunks = {where: record for where, record in self._read(WEIGHT_CHUNKS) if isinstance(record, Chunk)}
        found = {}
        for manifest in manifests:
            ref = manifest.blob
            assert ref is not None
            pieces = [chunks.get(Coordinates(partition=ref.partition, offset=chunk.offset)) for chunk in ref.chunks]
            if all(piece is not None for piece in pieces):
                found[manifest.version, manifest.sha256] = b"".join(piece.data for piece in pieces if piece is not None)
        return found

    def _tip(self, reports: list[StepReport], manifests: list[WeightManifest]) -> LearnerState | None:
        """The checkpoint that the log points at: the newest report's, or that of version 0. It is loadable."""
        if not manifests:
            return None
        store = self.pipeline.store
        name = reports[-1].checkpoint if reports else manifests[-1].checkpoint
        version = reports[-1].version if reports else 0
        # A claim that names a checkpoint of that version or a later one has made drops public since.
        named = [claim.tip_checkpoint for claim in self.read(STEPS, SessionClaim) if claim.tip_checkpoint and claim.tip_version >= version]
        state = store.load(named[-1] if named else name)
        store.load_outbox(state.id)
        if state.snapshot is not None:
            store.load_snapshot(state, WeightKind.LORA, file_names(WeightKind.LORA))
        return state

    def _trained_to(self, state: LearnerState) -> tuple[bytes, bytes]:
        folder = self.pipeline.store.trainer_folder(state.id)
        return (folder / "weights").read_bytes(), (folder / "moments").read_bytes()


def note(exc: BaseException, **what: object) -> None:
    """Say in an error how to come here again."""
    exc.add_note(", ".join(f"{name} = {value}" for name, value in what.items()))
