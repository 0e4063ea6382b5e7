"""The two modes side by side: the same demo, seeds and steps, asynchronous and sequential, and what Kafka costs the sequential one.

    python bench/modes.py [--seeds N] [--steps N] [--demo reverse|sort] [--json FILE]

For each seed in turn: the demo in both modes, and the sequential step once more with worker and learner joined by a bare pipe
(bench/pipe.py). `reward_mean`: the last ten steps' mean, over the seeds, with its standard error. `kafka_share`: of a sequential step, what
the pipe does without, median of the seeds. `worker_idle`: share of its time in which the worker generates nothing, its start included;
`learner_idle`: share of the steps' time in which the learner waits for its batch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from echo_ops.supervisor.placement import WorkerNeed, placement, this_machine
from echo_settings import load_settings

_PIPE = Path(__file__).with_name("pipe.py")
_PATIENCE_S = 900
MODES = ("asynchronous", "sequential")


def run_demo(demo: str, mode: str, seed: int, steps: int) -> dict[str, Any]:
    """The summary of `echoswarm demo`, in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        summary = Path(folder) / "summary.json"
        options = ["--mode", mode, "--seed", str(seed), "--steps", str(steps), "--plain", "--summary", str(summary)]
        _run([sys.executable, "-m", "echo_ops.cli", "demo", demo, *options], folder, {})
        return dict(json.loads(summary.read_text(encoding="utf-8")))


def run_pipe(demo: str, seed: int, steps: int) -> float:
    """Seconds a step of the sequential demo without Kafka, placed as the supervisor places it."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.toml"
        packaged = resources.files("echo_ops.demo").joinpath(f"{demo}.toml").read_text(encoding="utf-8")
        config.write_text(f'[run]\nmode = "sequential"\nseed = {seed}\n\n{packaged}', encoding="utf-8")
        places = placement(this_machine(), [WorkerNeed()])
        environ = {**places.learner.environ, **places.workers[0].environ}
        found = _run([sys.executable, str(_PIPE), str(config), str(steps)], folder, environ)
        return float(json.loads(found.splitlines()[-1])["s_per_step"])


def _run(command: list[str], folder: str, environ: Mapping[str, str]) -> str:
    found = subprocess.run(
        command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, timeout=_PATIENCE_S, check=False
    )
    if found.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {found.returncode}:\n{found.stdout[-2_000:]}\n{found.stderr[-2_000:]}")
    return found.stdout


def figures_of(summaries: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """One mode's numbers over its seeds."""
    rewards = [summary["reward_last"] for summary in summaries]
    return {
        "reward_mean": round(statistics.mean(rewards), 4),
        "reward_se": round(statistics.stdev(rewards) / len(rewards) ** 0.5, 4) if len(rewards) > 1 else 0.0,
        "wall_s": round(statistics.mean(summary["wall_seconds"] for summary in summaries), 1),
        "s_per_step": round(statistics.median(summary["s_per_step"] for summary in summaries), 4),
        "worker_idle": round(statistics.mean(_idle(summary["places"]["generation"]) for summary in summaries), 3),
        "learner_idle": round(statistics.mean(summary["bubble_ratio"] for summary in summaries), 3),
        "max_staleness": max(summary["max_staleness"] for summary in summaries),
    }


def _idle(place: Mapping[str, float]) -> float:
    return 1 - place["busy_s"] / max(1e-9, sum(place.values()))


def main() -> None:
    """Measure, print, and write the numbers where --json says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--demo", choices=("reverse", "sort"), default="reverse")
    parser.add_argument("--json", type=Path, help="write the numbers there too")
    arguments = parser.parse_args()
    # The base model is made once, by nobody's clock.
    from echo_tasks.base_models import resolve_base

    resolve_base(load_settings(Path(str(resources.files("echo_ops.demo").joinpath(f"{arguments.demo}.toml"))), {}).policy.base)
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
    shares = []
    for seed in range(arguments.seeds):
        pipe_s = run_pipe(arguments.demo, seed, arguments.steps)
        for mode in reversed(MODES):
            found[mode].append(run_demo(arguments.demo, mode, seed, arguments.steps))
        step_s = found["sequential"][-1]["s_per_step"]
        shares.append(1 - pipe_s / step_s)
        sys.stdout.write(
            f"seed {seed}: sequential {step_s:.3f} s/step, pipe {pipe_s:.3f}, asynchronous {found['asynchronous'][-1]['s_per_step']:.3f}; "
            f"reward {found['sequential'][-1]['reward_last']:.3f} and {found['asynchronous'][-1]['reward_last']:.3f}\n"
        )
        sys.stdout.flush()
    figures = {
        **{mode: figures_of(found[mode]) for mode in MODES},
        "kafka_share": round(statistics.median(shares), 3),
        "conditions": {
            "cores": len(this_machine().cores),
            "seeds": arguments.seeds,
            "steps": arguments.steps,
            "demo": arguments.demo,
            "load": round(os.getloadavg()[0], 1),
        },
    }
    sys.stdout.write(f"{json.dumps(figures)}\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
