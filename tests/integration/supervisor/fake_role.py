"""A role that writes the records a real one would, then waits to be drained; it notes in `order` when it was.

argv: role, name, behaviour, folder, announce. Behaviours: `train` (the learner ends well after its steps), `disagree` (so too, but its
probes differ), `again` (the learner finds its steps trained), `die` (a reward process exits 7 after the third step), `interrupt` (the
learner interrupts the supervisor after the third step), `stop` (as that, after an order to stop), `freeze` (as interrupt, but nobody
drains), `stay` (nobody ends by itself).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from echo_bus.client import profiles
from echo_bus.clock import Deadline
from echo_core.bottleneck import Place, Use
from echo_ops.cli.run import wait_for_topics
from echo_ops.orders import give_order
from echo_runtime.process import RoleProcess, open_role
from echo_schemas.records import (
    Drop,
    Progress,
    Record,
    RewardStats,
    RunControl,
    RunState,
    SessionClaim,
    StepReport,
    Trajectory,
    WeightManifest,
    WorkerState,
    WorkerStatus,
    group_id_of,
)
from echo_schemas.topics import DROPS, PROGRESS, STEPS, TRAJECTORIES, WEIGHTS, WORKERS, Topic
from echo_settings import load_settings

WAIT_S = 150.0
R = TypeVar("R", bound=Record)


def example(topic: Topic, cls: type[R]) -> R:
    # A script does not find `tests` by itself.
    sys.path.append(str(Path(__file__).parents[3]))
    from tests.examples import load_examples

    return next(record for record in load_examples(topic).values() if isinstance(record, cls))


class Role:
    def __init__(self, process: RoleProcess, name: str, behaviour: str, folder: Path) -> None:
        self.process, self.name, self.behaviour, self.folder = process, name, behaviour, folder
        self.run_id = process.settings.run.name
        self.publisher = process.bus.publisher(profiles.PRODUCER_LATENCY)

    def now_ms(self) -> int:
        return self.process.clock.time_ms()

    def publish(self, topic: Topic, record: Record, partition: int | None = None) -> None:
        self.publisher.publish(topic, record, partition=partition).wait(WAIT_S)

    def worker(self) -> None:
        status = replace(
            example(WORKERS, WorkerStatus), run_id=self.run_id, worker_id=self.name, state=WorkerState.READY, time_ms=self.now_ms(),
            installed_version=0, weights_sha256="a" * 64,
        )  # fmt: skip
        self.publish(WORKERS, status)
        sample = example(TRAJECTORIES, Trajectory)
        for seq in range(5):
            now_ms = self.now_ms()
            group = replace(sample, run_id=self.run_id, seq=seq, group_id=group_id_of(self.run_id, seq))
            self.publish(TRAJECTORIES, replace(group, requested_ms=now_ms, started_ms=now_ms, finished_ms=now_ms + 5))
        self.process.places.add(Place.GENERATION, Use.BUSY, 9.0)
        (self.folder / "sampled").touch()

    def learner(self) -> None:
        self.publish(STEPS, replace(example(STEPS, SessionClaim), run_id=self.run_id, time_ms=self.now_ms()), 0)
        self.publish(
            WEIGHTS, replace(example(WEIGHTS, WeightManifest), run_id=self.run_id, version=0, parent=None, created_ms=self.now_ms()), 0
        )
        self.publish(PROGRESS, replace(example(PROGRESS, Progress), run_id=self.run_id, time_ms=self.now_ms()))
        dropped = replace(example(DROPS, Drop), run_id=self.run_id, group_id=group_id_of(self.run_id, 1), seq=1, time_ms=self.now_ms())
        self.publish(DROPS, dropped)
        self.wait_for("sampled")
        # One that is told to end before it listens dies of it.
        for name in ("feeder", "worker-0", "reward-0"):
            self.wait_for(f"{name}.up")
        steps = self.process.settings.learner.steps
        if self.behaviour == "again":
            self.publish(
                PROGRESS, replace(example(PROGRESS, Progress), run_id=self.run_id, version=steps, published=steps, time_ms=self.now_ms())
            )
            return
        for number in range(1, steps + 1):
            self.publish(STEPS, self.step(number), 0)
            if number == 3:
                (self.folder / "third_step").touch()
                if self.behaviour == "stop":
                    give_order(self.process.bus, self.run_id, None, run=RunControl(state=RunState.STOPPING))
                if self.behaviour in {"interrupt", "freeze", "stop"}:
                    os.kill(os.getppid(), signal.SIGINT)
                if self.behaviour not in {"train", "disagree"}:
                    self.wait()
                    return

    def step(self, number: int) -> StepReport:
        stats = (RewardStats(name="exact", mean=number / 20, std=0.0, minimum=0.0, maximum=1.0),)
        difference = 2e-2 if self.behaviour == "disagree" else 1e-5
        return replace(
            example(STEPS, StepReport), run_id=self.run_id, version=number, reward_stats=stats, staleness_total=(1, 3), idle_s=0.1,
            training_s=0.3, metrics={"probe_samples": 4.0, "probe_logprob_diff_max": difference}, time_ms=self.now_ms(),
        )  # fmt: skip

    def wait_for(self, file: str) -> None:
        deadline = Deadline.after(WAIT_S)
        while not (self.folder / file).exists():
            assert not deadline.expired(), f"waited for {file}"
            self.process.stop.wait(0.02)

    def wait(self) -> None:
        """Until drained; in behaviour `freeze` beyond that, and the second interrupt is sent by whoever is asked first."""
        assert self.process.stop.wait(WAIT_S), "waited to be drained"
        with (self.folder / "order").open("a", encoding="utf-8") as order:
            order.write(f"{self.name}\n")
        if self.behaviour == "freeze":
            os.kill(os.getppid(), signal.SIGINT)
            signal.sigwait({signal.SIGUSR1})

    def run(self, role: str) -> None:
        (self.folder / f"{self.name}.up").touch()
        if role == "learner":
            self.learner()
            return
        if role == "worker":
            self.worker()
        if role == "reward" and self.behaviour == "die":
            self.wait_for("third_step")
            sys.stderr.write("the reward function ate the disk\n")
            raise SystemExit(7)
        self.wait()


def main() -> None:
    role, name, behaviour, folder, announce = sys.argv[1:]
    unfinished = Path(folder) / f"{name}.unfinished"
    unfinished.write_text(json.dumps({"pid": os.getpid(), "cores": sorted(os.sched_getaffinity(0))}))
    unfinished.replace(unfinished.with_suffix(".pid"))
    with ExitStack() as stack:
        process = stack.enter_context(open_role(load_settings(None, os.environ), role, name=name, announce=Path(announce)))
        assert wait_for_topics(process.bus, process.stop, Deadline.after(WAIT_S)), "waited for the topics"
        actor = Role(process, name, behaviour, Path(folder))
        stack.enter_context(closing(actor.publisher))
        actor.run(role)


if __name__ == "__main__":
    main()
