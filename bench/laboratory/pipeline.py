"""One cell as a real run: its own Kafka, `echoswarm up`, and then the results from the log."""

from __future__ import annotations

import shutil
import subprocess
import time
from contextlib import closing
from pathlib import Path

from buses import records_of
from guarded import running

from echo_bus.clock import Deadline
from echo_embedded import EmbeddedKafka
from echo_embedded.guard import Guard
from echo_ops.report.evaluations import shown_reward
from echo_ops.report.run_view import RunView
from echo_runtime.opening import open_bus
from echo_schemas.topics import DROPS, EVALS, STEPS
from echo_settings import load_settings
from laboratory.matrix import Cell, as_toml
from laboratory.results import Curve, Evaluated, Result

_SHOWN = 3_000
# In the log of a learner that ends because a number is not finite.
_DIVERGED = "not finite"
_CLI = ("-m", "echo_ops.cli")


def run_pipeline(cell: Cell, folder: Path, patience_s: float) -> Result:
    """Run `cell` in `folder`. Raises RuntimeError, with the end of the output, if it fails for another reason than divergence."""
    with EmbeddedKafka(folder=folder / "kafka") as kafka, closing(Guard()) as guard:
        config = folder / "run.toml"
        own = {"kafka": {"bootstrap": kafka.bootstrap, "namespace": "echo.learning"}, "checkpoint": {"folder": "run"}}
        config.write_text(as_toml({**cell.settings, **own}), encoding="utf-8")
        started_s = time.monotonic()
        with running(guard, folder, "up", *_CLI, "up", "--config", config.name, "--plain") as process:
            _wait(process, guard, folder, cell, patience_s)
        wall_s = time.monotonic() - started_s
        said = (folder / "up.log").read_text(encoding="utf-8")
        learner = folder / "run" / "logs" / "learner.log"
        has_diverged = learner.exists() and _DIVERGED in learner.read_text(encoding="utf-8")
        if process.returncode != 0 and not has_diverged:
            message = f"{cell.name} ended with {process.returncode}:\n{said[-_SHOWN:]}"
            raise RuntimeError(message)
        view = _read(config, cell)
    shutil.rmtree(folder / "kafka", ignore_errors=True)
    return _result(view, wall_s, "diverged" if has_diverged else "finished")


def _wait(process: subprocess.Popen[bytes], guard: Guard, folder: Path, cell: Cell, patience_s: float) -> None:
    """Wait until the run has ended. If the cell asks for it, kill and replace its second worker at intervals."""
    deadline, num_dead = Deadline.after(patience_s), 0
    while process.poll() is None and not deadline.expired():
        if not cell.kill_every_s:
            _nap(process, patience_s)
            continue
        name = f"mortal-{num_dead}"
        with running(guard, folder, name, *_CLI, "run", "worker", "--name", name, "--config", "run.toml") as mortal:
            _nap(process, cell.kill_every_s)
            mortal.kill()
        num_dead += 1
    if process.poll() is None:
        message = f"{cell.name} has not ended within {patience_s:.0f} s"
        raise RuntimeError(message)


def _nap(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait so long, or until the run has ended."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _read(config: Path, cell: Cell) -> RunView:
    settings = load_settings(config, {})
    view = RunView(settings.run.name, started_ms=0, steps_wanted=settings.learner.steps, budget=settings.budget)
    for record in records_of(open_bus(settings, "view"), [STEPS, DROPS, EVALS]):
        view.apply(record)
    if not view.steps:
        message = f"{cell.name} has trained no step"
        raise RuntimeError(message)
    return view


def _result(view: RunView, wall_s: float, outcome: str) -> Result:
    curve = Curve()
    for step in view.steps:
        age = sum(age * count for age, count in enumerate(step.staleness)) / step.samples
        curve.add(step.number, step.time_s, step.samples, step.reward, age)
    shown = [(each, shown_reward(each)) for each in view.evaluations.all]
    evaluated = [Evaluated(name=each.name, version=each.version, mean=stats.mean, stderr=stats.stderr) for each, stats in shown]
    ages = view.staleness()
    facts = {
        "max_staleness": max((age for age, count in enumerate(ages) if count), default=0),
        "dropped": sum(view.drops.values()),
        "bubble": view.bubble_ratio(),
    }
    return Result(outcome=outcome, wall_s=wall_s, curve=curve, evaluated=evaluated, facts=facts)
