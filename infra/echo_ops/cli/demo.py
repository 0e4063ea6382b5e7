"""`echoswarm demo`: a packaged run, begun here, or gone on with if it was begun here and did not finish."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import asdict, dataclass, replace
from importlib import resources
from pathlib import Path

from echo_ops.cli.output import out
from echo_ops.cli.up import Options, execute
from echo_ops.supervisor.broker import given_bootstrap
from echo_ops.supervisor.supervisor import RunEnd
from echo_schemas.errors import UserError

# Nats. Two correct implementations of the demo's model in fp32 differ by 1e-5; a wrong adapter or weight shows as 1e-2 and more.
_FP32_AGREEMENT = 1e-4
_RUNS = Path("runs")
_BEGUN, _CONFIG, _SUMMARY, _KAFKA = "demo.json", "run.toml", "summary.json", "kafka"


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What the command line said as a demo was begun, and whose Kafka holds its log; None: its own."""

    mode: str
    seed: int
    steps: int | None
    kafka: str | None


def demo_name(name: str | None, task: str | None) -> str:
    """Which packaged run is meant. Raises UserError for a digits demo and a task at once."""
    if name is not None and task is not None:
        raise UserError(f"There is no demo {name} of {task}.", hint=f"Write `echoswarm demo {name}` or `echoswarm demo --task {task}`.")
    return name or task or "reverse"


def demo(name: str, *, mode: str, seed: int, steps: int | None, new: bool, options: Options) -> None:
    """The packaged run `name`, in a folder below `runs`: the newest one that was begun by the same command and has not finished, unless
    `new`; else a fresh one. Exits as `up`, and 1 if learner and worker disagree.
    """
    begun = Begun(mode=mode, seed=seed, steps=steps, kafka=given_bootstrap(os.environ.get("ECHO_KAFKA__BOOTSTRAP", "embedded")))
    folder = None if new else unfinished(name, begun)
    if folder is None:
        folder = _begin(name, begun)
        out.print(
            f"[bold]echoswarm demo {name}[/]: Kafka, vLLM, Faust and DeepSpeed as processes on this machine; its files: [bold]{folder}[/]"
        )
    else:
        out.print(f"[bold]echoswarm demo {name}[/]: going on with [bold]{folder}[/], which has not finished (`--new` begins another)")
    if steps is not None:
        options.overrides["ECHO_LEARNER__STEPS"] = str(steps)
    try:
        execute(folder / _CONFIG, replace(options, agreement=_FP32_AGREEMENT, summary=None, kafka_folder=folder / _KAFKA))
    finally:
        if options.summary is not None and (folder / _SUMMARY).exists():
            options.summary.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / _SUMMARY, options.summary)
        if _has_finished(folder):
            shutil.rmtree(folder / _KAFKA, ignore_errors=True)
        else:
            out.print("It has not finished: the same command goes on with it, and `--new` begins another.")


def unfinished(name: str, begun: Begun) -> Path | None:
    """The folder of the newest demo that was begun so and can be gone on with."""
    for folder in sorted(_RUNS.glob(f"{name}-*"), reverse=True):
        try:
            found = json.loads((folder / _BEGUN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if found == asdict(begun) and not _has_finished(folder):
            return folder
    return None


def _begin(name: str, begun: Begun) -> Path:
    folder = _RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True, exist_ok=False)
    packaged = resources.files("echo_ops.demo").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    own = f'[run]\nname = "{folder.name}"\nmode = "{begun.mode}"\nseed = {begun.seed}\n\n[checkpoint]\nfolder = "{folder.as_posix()}"\n'
    (folder / _CONFIG).write_text(f"{packaged}\n{own}", encoding="utf-8")
    (folder / _BEGUN).write_text(json.dumps(asdict(begun)) + "\n", encoding="utf-8")
    return folder


def _has_finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / _SUMMARY).read_text(encoding="utf-8"))["outcome"] == RunEnd.FINISHED)
    except (OSError, ValueError, KeyError):
        return False
