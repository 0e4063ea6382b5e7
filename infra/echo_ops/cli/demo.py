"""`echoswarm demo`: a packaged run in a folder below `runs`; an unfinished one is continued."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

import typer

from echo_ops.cli.output import out
from echo_ops.cli.up import SUPERVISOR_LOG, Options, Plain, ReportFile, Steps, SummaryFile, execute, has_finished
from echo_ops.supervisor.broker import given_bootstrap
from echo_ops.supervisor.child import RoleRefused
from echo_schemas.errors import UserError

# Nats. Two correct implementations of the demo's model in fp32 differ by 1e-5; a wrong adapter or weight shows as 1e-2 and more.
_FP32_AGREEMENT = 1e-4
_RUNS = Path("runs")
_BEGUN, _CONFIG, _SUMMARY, _KAFKA = "demo.json", "run.toml", "summary.json", "kafka"


def demo_name(name: str | None, task: str | None) -> str:
    """The name of the packaged run. Raises UserError where both a digits demo and a task are given."""
    if name is not None and task is not None:
        raise UserError(f"There is no demo {name} of {task}.", hint=f"Write `echoswarm demo {name}` or `echoswarm demo --task {task}`.")
    return name or task or "reverse"


def demo(
    name: Annotated[Literal["reverse", "sort"] | None, typer.Argument(help="reverse (without a name): LoRA; sort: all weights.")] = None,
    task: Annotated[
        Literal["sokoban", "knights-knaves"] | None, typer.Option(help="One of ECHO's tasks in its smallest form, in up to ten minutes.")
    ] = None,
    mode: Annotated[
        Literal["asynchronous", "sequential"], typer.Option(help="Generate ahead of the learner, or for each step what it asks for.")
    ] = "asynchronous",
    seed: Annotated[int, typer.Option(help="Decides the prompts.")] = 0,
    steps: Steps = None,
    plain: Plain = False,
    summary: SummaryFile = None,
    report: ReportFile = None,
    new: Annotated[bool, typer.Option("--new", help="Begin another, even if the last one here has not finished.")] = False,
) -> None:
    """Continue the newest unfinished demo that was begun with the same options, unless `new`; else begin one. Exits as `up`, and 1 if
    learner and worker disagree.
    """
    packaged = demo_name(name, task)
    kafka = given_bootstrap(os.environ.get("ECHO_KAFKA__BOOTSTRAP", "embedded"))
    begun = {"mode": mode, "seed": seed, "steps": steps, "kafka": kafka}
    earlier = None if new else unfinished(packaged, begun)
    folder = earlier or _begin(packaged, begun)
    if earlier is None:
        out.print(f"[bold]echoswarm demo {packaged}[/]: Kafka, vLLM, Faust and DeepSpeed on this machine; its files: [bold]{folder}[/]")
    else:
        out.print(f"[bold]echoswarm demo {packaged}[/]: going on with [bold]{folder}[/], which has not finished (`--new` begins another)")
    out.print(
        "Its Kafka ends with it: to look at a demo from another terminal, type `echoswarm kafka up` before it."
        if kafka is None
        else f"Look at it from another terminal: [bold]echoswarm view -c {folder / _CONFIG}[/]"
    )
    options = Options(plain=plain, report=report, steps=steps, agreement=_FP32_AGREEMENT, kafka_folder=folder / _KAFKA)
    is_refused = False
    try:
        execute(folder / _CONFIG, options)
    except UserError as exc:
        is_refused = not isinstance(exc, RoleRefused)
        if is_refused and earlier is None and not (folder / SUPERVISOR_LOG).exists():
            # Nothing of it has begun, so leave no folder that a later demo would continue. A folder from before may be another command's.
            shutil.rmtree(folder)
        raise
    finally:
        if summary is not None and (folder / _SUMMARY).exists():
            summary.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / _SUMMARY, summary)
        if has_finished(folder / _SUMMARY):
            shutil.rmtree(folder / _KAFKA, ignore_errors=True)
        elif not is_refused:
            out.print("It has not finished: the same command goes on with it, and `--new` begins another.")


def unfinished(name: str, begun: Mapping[str, object]) -> Path | None:
    """The folder of the newest demo of that name that was begun with the same options and has not finished.

    `kafka` is the address of the Kafka with its log; None: it started one.
    """
    for folder in sorted(_RUNS.glob(f"{name}-*"), reverse=True):
        try:
            found = json.loads((folder / _BEGUN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if found == begun and not has_finished(folder / _SUMMARY):
            return folder
    return None


def _begin(name: str, begun: Mapping[str, object]) -> Path:
    folder = _RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True, exist_ok=False)
    packaged = resources.files("echo_ops.demo").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    mode, seed = begun["mode"], begun["seed"]
    own = f'[run]\nname = "{folder.name}"\nmode = "{mode}"\nseed = {seed}\n\n[checkpoint]\nfolder = "{folder.as_posix()}"\n'
    (folder / _CONFIG).write_text(f"{packaged}\n{own}", encoding="utf-8")
    (folder / _BEGUN).write_text(json.dumps(begun) + "\n", encoding="utf-8")
    return folder
