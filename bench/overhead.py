"""What the log costs: seconds a step with Kafka, Faust and all roles, against the same worker and learner joined by a bare pipe.

    python bench/overhead.py [--rounds N] [--steps N] [--demo reverse|sort] [--json FILE]

Pipeline and pipe run in turn on the same cores with the same placement; the pipeline's step has its checkpoint and its transaction in it.
Medians over the rounds are printed, and the ratio's own median: machines are shared and noisy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

from echo_ops.supervisor.placement import WorkerNeed, placement, this_machine
from echo_settings import load_settings

_PIPE = Path(__file__).with_name("pipe.py")
_PATIENCE_S = 600


def run_pipeline(demo: str, steps: int, folder: Path) -> dict[str, Any]:
    """`echoswarm demo` in a folder of its own; its summary."""
    summary = folder / "summary.json"
    command = [sys.executable, "-m", "echo_ops.cli", "demo", demo, "--plain", "--steps", str(steps), "--summary", str(summary)]
    _run(command, folder, {})
    return dict(json.loads(summary.read_text(encoding="utf-8")))


def run_pipe(demo: str, steps: int, folder: Path) -> dict[str, Any]:
    """The baseline under the environment that the supervisor gives to its worker and its learner."""
    config = folder / "run.toml"
    config.write_text(resources.files("echo_ops.demo").joinpath(f"{demo}.toml").read_text(encoding="utf-8"), encoding="utf-8")
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=50, help="training steps a run; the first ten are not counted")
    parser.add_argument("--demo", choices=("reverse", "sort"), default="reverse")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    arguments = parser.parse_args()
    # The base model is made once, by neither side's clock.
    from echo_tasks.base_models import resolve_base

    resolve_base(load_settings(Path(str(resources.files("echo_ops.demo").joinpath(f"{arguments.demo}.toml"))), {}).policy.base)
    pipelines, pipes, agreements = [], [], []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            pipes.append(run_pipe(arguments.demo, arguments.steps, Path(folder))["s_per_step"])
            summary = run_pipeline(arguments.demo, arguments.steps, Path(folder))
        pipelines.append(summary["s_per_step"])
        agreements.append(summary["logprob_max_diff"])
        sys.stdout.write(
            f"round {number + 1}: pipeline {pipelines[-1]:.3f} s/step, pipe {pipes[-1]:.3f}, ratio {pipelines[-1] / pipes[-1]:.2f}; "
            f"learner outside compute {summary['learner_outside_compute']:.1%}, idle {summary['bubble_ratio']:.1%}, "
            f"weights installed in {summary['t_bcast_p50_s']:.3f} s\n"
        )
        sys.stdout.flush()
    figures = {
        "pipeline_s_per_step": round(statistics.median(pipelines), 4),
        "pipe_s_per_step": round(statistics.median(pipes), 4),
        "ratio": round(statistics.median(ours / bare for ours, bare in zip(pipelines, pipes, strict=True)), 3),
        "logprob_max_diff": max(agreements),
        "conditions": {"cores": len(this_machine().cores), "rounds": arguments.rounds, "steps": arguments.steps, "demo": arguments.demo},
    }
    sys.stdout.write(f"{json.dumps(figures)}\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
