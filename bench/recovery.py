"""How long a run of the demo's size needs after a kill of its learner, worker, rewards or a broker, and to end; the cost of checkpoints.

    python bench/recovery.py [--kills N] [--engine vllm|transformers] [--json FILE]

The packaged demo `reverse` on three brokers, every role a process. On a busy machine only the CPU seconds are reliable.

    learner_s        the learner's process started again after kill -9 ─▶ its next new step in the log; the worst of N
    worker_s         the worker's process started again after kill -9 ─▶ the next step after its first new samples; the worst of N
    reward_s         the reward process started again after kill -9 ─▶ its first rewards; the worst of N. reward_ready_s: from the moment
                     at which it has imported everything and reached Kafka; reward_stall_s: the longest time without a step
    *_floor_s        what a bare process of the same environment needs to import and start the trainer or the engine, while the role's own
                     process is frozen: the median of N. *_ratio: the role's median over it
    broker_stall_s   one of three brokers killed and left dead: the longest time without a step; the worst of the three
    sigterm_max_s    SIGTERM to every process of a busy run ─▶ the last one gone
    checkpoint_share seconds of checkpoints over seconds of steps, at `every = 1`
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buses import records_of
from command import parser_of, save
from processor_time import cpu_s

from echo_bus.clock import Deadline
from echo_bus.reading.reader import From
from echo_schemas.records import StepReport, Trajectory
from echo_schemas.topics import REWARDS, STEPS, TRAJECTORIES

if TYPE_CHECKING:
    from tests.chaos.scene import Scene

_PIPE = Path(__file__).with_name("pipe.py")
_WITHIN_S = 600.0
_WARM_STEPS = 10
# The time in which the cluster notices a killed broker; a shorter stall may be a slow step.
_DEAD_S = 10.0
_RANDOM_MOMENT_S = 2.0


def main() -> None:
    """Measure, and print one JSON object."""
    # Uses the run on three brokers of the chaos suite, which is not installed.
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.chaos.scene import open_scene

    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=5, help="of the learner, and as many of the worker and the reward process")
    parser.add_argument("--engine", default="vllm", help="of the worker")
    arguments = parser.parse_args()
    demo = resources.files("echo_ops.demo").joinpath("reverse.toml").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="echoswarm-recovery-") as name:
        folder = Path(name)
        (folder / "run.toml").write_text(demo, encoding="utf-8")
        changes = {"ECHO_LEARNER__STEPS": "0", "ECHO_ROLLOUT__ENGINE": arguments.engine}
        with open_scene(folder, changes, config=folder / "run.toml", has_faults=False) as scene:
            found = measure(scene, arguments.kills)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
    save(arguments.json, found)


def measure(scene: Scene, num_kills: int) -> dict[str, Any]:
    """Measure all on one run, and end it."""
    scene.wait_for(_WARM_STEPS, _WITHIN_S, "the run begins")
    learner = [_kill_learner(scene) for _ in range(num_kills)]
    worker = [_kill_worker(scene) for _ in range(num_kills)]
    rewards = [_kill_reward(scene) for _ in range(num_kills)]
    floors = {name: statistics.median(_floor(scene, name) for _ in range(num_kills)) for name in ("learner", "worker-0")}
    stalls = [_kill_broker(scene, broker) for broker in range(len(scene.kafka.nodes))]
    reports = [record for record in records_of(scene.bus, [STEPS], _WITHIN_S) if isinstance(record, StepReport)][_WARM_STEPS:]
    step_s = statistics.median(report.training_s + report.idle_s for report in reports)
    checkpoint_s = [report.metrics["checkpoint_s"] for report in reports]
    share = sum(checkpoint_s) / sum(report.training_s for report in reports)
    learner_s, worker_s = (statistics.median(wall for wall, _ in found) for found in (learner, worker))
    return {
        "learner_s": round(max(wall for wall, _ in learner), 2),
        "learner_median_s": round(learner_s, 2),
        "learner_floor_s": round(floors["learner"], 2),
        "learner_ratio": round(learner_s / floors["learner"], 2),
        "learner_cpu_s": round(statistics.median(cpu for _, cpu in learner), 2),
        "worker_s": round(max(wall for wall, _ in worker), 2),
        "worker_median_s": round(worker_s, 2),
        "worker_floor_s": round(floors["worker-0"], 2),
        "worker_ratio": round(worker_s / floors["worker-0"], 2),
        "worker_cpu_s": round(statistics.median(cpu for _, cpu in worker), 2),
        **_of_rewards(rewards),
        "broker_stall_s": round(max(stalls), 2),
        "broker_stalls_s": [round(stall, 2) for stall in stalls],
        "step_s": round(step_s, 3),
        "sigterm_max_s": round(_terminate(scene), 2),
        "checkpoint_ms": round(1000 * statistics.median(checkpoint_s), 1),
        "checkpoint_share": round(share, 4),
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def _kill_learner(scene: Scene) -> tuple[float, float]:
    """Wall seconds to its next new step, and CPU seconds of the new process by then."""
    scene.wait(random.random() * _RANDOM_MOMENT_S)
    scene.swarm.kill("learner")
    version, started_s = scene.follower.version, time.monotonic()
    scene.swarm.start("learner")
    # Records that the crash kept from the log are published first; they are no new step.
    scene.wait_until(lambda: "Going on from version" in _new_lines(scene, "learner"), _WITHIN_S, "the learner goes on")
    resumed = int(_new_lines(scene, "learner").rpartition("Going on from version ")[2].split()[0])
    scene.wait_for(max(version, resumed) + 1, _WITHIN_S, "the killed learner trains again")
    found = scene.follower.seen_s(max(version, resumed) + 1) - started_s, cpu_s(scene.swarm.pid("learner"))
    scene.wait_for(scene.follower.version + _WARM_STEPS, _WITHIN_S, "the run settles")
    return found


def _kill_worker(scene: Scene) -> tuple[float, float]:
    """Wall seconds to the step after its first new samples, and CPU seconds of the new process by then."""
    scene.wait(random.random() * _RANDOM_MOMENT_S)
    with closing(scene.bus.reader([TRAJECTORIES])) as reader:
        scene.swarm.kill("worker-0")
        started_s, started_ms = time.monotonic(), scene.bus.clock.time_ms()
        reader.start(otherwise=From.END)
        scene.swarm.start("worker-0")
        deadline = Deadline.after(_WITHIN_S)
        while not any(isinstance(m.record, Trajectory) and m.record.started_ms >= started_ms for m in reader.read(timeout_s=0.05)):
            assert not deadline.expired(), "waited for the killed worker's next sample"
    version = scene.follower.version
    scene.wait_for(version + 1, _WITHIN_S, "the killed worker's samples are trained")
    found = scene.follower.seen_s(version + 1) - started_s, cpu_s(scene.swarm.pid("worker-0"))
    scene.wait_for(scene.follower.version + _WARM_STEPS, _WITHIN_S, "the run settles")
    return found


def _kill_reward(scene: Scene) -> tuple[float, float, float]:
    """Seconds from its start to its first rewards, of these after it has reached Kafka, and the longest time without a step."""
    scene.wait(random.random() * _RANDOM_MOMENT_S)
    with closing(scene.bus.reader([REWARDS])) as reader:
        killed_s = time.monotonic()
        scene.swarm.kill("reward-0")
        reader.start(otherwise=From.END)
        scene.swarm.start("reward-0")
        started_s, ready_s = time.monotonic(), 0.0
        deadline = Deadline.after(_WITHIN_S)
        while not (reader.read(timeout_s=0.02) and ready_s):
            if not ready_s and ", as the group " in _new_lines(scene, "reward-0"):
                ready_s = time.monotonic()
            assert not deadline.expired(), "waited for the killed reward process's next reward"
        found_s = time.monotonic()
    scene.wait_for(scene.follower.version + _WARM_STEPS, _WITHIN_S, "the run settles")
    return found_s - started_s, found_s - ready_s, scene.follower.longest_gap_s(killed_s, scene.follower.version)


def _floor(scene: Scene, name: str) -> float:
    """Seconds until a bare process in place of the role's own, which is frozen meanwhile, has started the same engine or trainer."""
    child = scene.swarm.child(name)
    plan = child.plan
    command, output = [sys.executable, str(_PIPE), str(scene.swarm.config), plan.role], plan.log.with_name("bare.log")
    scene.swarm.freeze(child)
    started_s = time.monotonic()
    try:
        with (
            output.open("wb") as log,
            subprocess.Popen(command, env={**os.environ, **plan.environ}, stdout=log, stderr=subprocess.STDOUT) as bare,
        ):
            if plan.cores:
                os.sched_setaffinity(bare.pid, plan.cores)
        found_s = time.monotonic() - started_s
    finally:
        scene.swarm.thaw(child)
    assert bare.returncode == 0, output.read_text(encoding="utf-8", errors="replace")
    scene.wait_for(scene.follower.version + _WARM_STEPS, _WITHIN_S, "the run settles")
    return found_s


def _of_rewards(found: list[tuple[float, float, float]]) -> dict[str, float]:
    """The worst of each, and the medians."""
    columns = dict(zip(("reward", "reward_ready", "reward_stall"), zip(*found, strict=True), strict=True))
    worst = {f"{name}_s": round(max(seconds), 2) for name, seconds in columns.items()}
    return worst | {f"{name}_median_s": round(statistics.median(seconds), 2) for name, seconds in columns.items()}


def _kill_broker(scene: Scene, broker: int) -> float:
    """The longest time without a step while it is dead."""
    node, killed_s = scene.kafka.nodes[broker], time.monotonic()
    node.kill()
    scene.pause(_DEAD_S)
    scene.wait_for(scene.follower.version + 2, _WITHIN_S, f"two of three brokers, without {node.node_id}")
    stall_s = scene.follower.longest_gap_s(killed_s, scene.follower.version)
    node.start(_WITHIN_S)
    scene.wait_for(scene.follower.version + _WARM_STEPS, _WITHIN_S, "the run settles")
    return stall_s


def _terminate(scene: Scene) -> float:
    started_s = time.monotonic()
    scene.swarm.terminate_all()
    for name in scene.swarm.names:
        scene.swarm.wait_ended(scene.swarm.child(name), Deadline.after(_WITHIN_S), scene.wait)
    return time.monotonic() - started_s


def _new_lines(scene: Scene, name: str) -> str:
    """The log lines of the role's present process."""
    text = scene.swarm.child(name).plan.log.read_text(encoding="utf-8", errors="replace")
    return text[scene.swarm.log_start(name) :]


if __name__ == "__main__":
    main()
