"""The cost of the log: seconds a step with Kafka, Faust and all roles, against the same worker and learner joined by a bare pipe.

    python bench/overhead.py [--rounds N] [--steps N] [--demo reverse|sort] [--mode asynchronous|sequential]
                              [--json FILE]

Pipeline and pipe run in turn on the same cores with the same placement; the pipeline's step includes its checkpoint and its transaction.
Medians over the rounds are printed, and the ratio's own median: machines are shared and noisy. CPU time varies less. It is given in
microseconds a trained sample, from the tenth step to the last (`cpu_us_per_sample`): `engine` and `trainer` are those of the pipe's worker
and learner, `worker` and `learner` the additional ones of ours, the other roles their own. Cores differ in speed, so `ours_share` and
`broker_share` give what our processes and the broker add as parts of engine and trainer together.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from command import parser_of, save
from processor_time import cpu_by_role

from echo_ops.supervisor.placement import WorkerNeed, placement, this_machine
from echo_settings import load_settings

_PIPE = Path(__file__).with_name("pipe.py")
_PATIENCE_S = 600
# The first steps are not counted, as in the run's own summary.
_WARM_UP = 10


def run_pipeline(demo: str, mode: str, steps: int, folder: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """`echoswarm demo` in a folder of its own: its summary, and the CPU seconds of its roles between the tenth step and the last."""
    summary, log = folder / "summary.json", folder / "output"
    options = ["--mode", mode, "--plain", "--steps", str(steps), "--summary", str(summary)]
    command = [sys.executable, "-m", "echo_ops.cli", "demo", demo, *options]
    marks: list[Mapping[str, float]] = []
    with log.open("w", encoding="utf-8") as output:
        demo_process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=output, text=True)
        assert demo_process.stdout is not None
        for line in demo_process.stdout:
            output.write(line)
            if f" step {_WARM_UP}/" in line or f" step {steps}/" in line:
                marks.append(cpu_by_role(demo_process.pid))
    if demo_process.wait(_PATIENCE_S) or len(marks) < 2:
        sys.exit(f"{' '.join(command)} ended with {demo_process.returncode}:\n{log.read_text(encoding='utf-8')[-2_000:]}")
    used = {role: seconds - marks[0].get(role, 0.0) for role, seconds in marks[-1].items()}
    return dict(json.loads(summary.read_text(encoding="utf-8"))), used


def samples_of(demo: str, steps: int) -> int:
    """Samples that are trained after the warm-up."""
    settings = load_settings(Path(str(resources.files("echo_ops.demo").joinpath(f"{demo}.toml"))), {})
    return (steps - _WARM_UP) * settings.learner.groups_per_step * settings.rollout.group_size


def us_per_sample(ours: Mapping[str, float], pipe: Mapping[str, float], num_samples: int) -> dict[str, float]:
    """CPU microseconds a sample by role; `engine` and `trainer` are taken out of ours."""
    parts = {"engine": pipe["worker"], "trainer": pipe["learner"], **ours}
    parts |= {"worker": ours["worker"] - pipe["worker"], "learner": ours["learner"] - pipe["learner"]}
    return {role: round(1e6 * seconds / num_samples, 1) for role, seconds in parts.items()}


def shares(cost: Mapping[str, float]) -> dict[str, float]:
    """What our processes and the broker cost, as parts of engine and trainer."""
    bare = cost["engine"] + cost["trainer"]
    ours = sum(us for role, us in cost.items() if role not in {"engine", "trainer", "broker"})
    return {"ours_share": round(ours / bare, 4), "broker_share": round(cost["broker"] / bare, 4)}


def run_pipe(demo: str, mode: str, steps: int, folder: Path) -> dict[str, Any]:
    """The baseline under the environment that the supervisor gives to its worker and its learner."""
    config = folder / "run.toml"
    packaged = resources.files("echo_ops.demo").joinpath(f"{demo}.toml").read_text(encoding="utf-8")
    config.write_text(f'[run]\nmode = "{mode}"\n\n{packaged}', encoding="utf-8")
    places = placement(this_machine(), [WorkerNeed()])
    environ = {**places.learner.environ, **places.workers[0].environ}
    return dict(json.loads(_run([sys.executable, str(_PIPE), str(config), str(steps)], folder, environ).splitlines()[-1]))


def _run(command: list[str], folder: Path, environ: dict[str, str]) -> str:
    found = subprocess.run(
        command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    if found.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {found.returncode}:\n{found.stdout[-2_000:]}\n{found.stderr[-2_000:]}")
    return found.stdout


def main() -> None:
    """Measure, print, and write the numbers where --json says."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=50, help="training steps a run; the first ten are not counted")
    parser.add_argument("--demo", choices=("reverse", "sort"), default="reverse")
    parser.add_argument("--mode", choices=("asynchronous", "sequential"), default="asynchronous")
    arguments = parser.parse_args()
    # The base model is made once, outside of both measurements.
    from echo_tasks.base_models import resolve_base

    resolve_base(load_settings(Path(str(resources.files("echo_ops.demo").joinpath(f"{arguments.demo}.toml"))), {}).policy.base)
    pipelines, pipes, agreements, costs = [], [], [], []
    num_samples = samples_of(arguments.demo, arguments.steps)
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            pipe = run_pipe(arguments.demo, arguments.mode, arguments.steps, Path(folder))
            pipes.append(pipe["s_per_step"])
            summary, used = run_pipeline(arguments.demo, arguments.mode, arguments.steps, Path(folder))
        costs.append(us_per_sample(used, pipe["cpu_s"], num_samples))
        pipelines.append(summary["s_per_step"])
        agreements.append(summary["logprob_max_diff"])
        sys.stdout.write(
            f"round {number + 1}: pipeline {pipelines[-1]:.3f} s/step, pipe {pipes[-1]:.3f}, ratio {pipelines[-1] / pipes[-1]:.2f}; "
            f"learner outside compute {summary['learner_outside_compute']:.1%}, idle {summary['bubble_ratio']:.1%}, "
            f"weights installed in {summary['t_bcast_p50_s']:.3f} s; CPU, µs a sample: {costs[-1]}\n"
        )
        sys.stdout.flush()
    medians = {role: round(statistics.median(cost.get(role, 0.0) for cost in costs), 1) for role in costs[0]}
    figures = {
        "pipeline_s_per_step": round(statistics.median(pipelines), 4),
        "pipe_s_per_step": round(statistics.median(pipes), 4),
        "ratio": round(statistics.median(ours / bare for ours, bare in zip(pipelines, pipes, strict=True)), 3),
        "cpu_us_per_sample": medians,
        **shares(medians),
        "logprob_max_diff": max(agreements),
        "conditions": {
            "cores": len(this_machine().cores),
            "rounds": arguments.rounds,
            "steps": arguments.steps,
            "demo": arguments.demo,
            "mode": arguments.mode,
        },
    }
    sys.stdout.write(f"{json.dumps(figures)}\n")
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
