"""`echoswarm runs`: list runs, order them to pause, stop or go on, archive and remove them."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from echo_bus.bus import Bus
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import AsJson, Config, Yes, same_file
from echo_ops.cli.output import out, remark, shown_time
from echo_ops.cli.past import run_named
from echo_ops.orders import give_order
from echo_ops.runs.deletion import Remains, find_remains, remove
from echo_ops.runs.listing import RunLine, RunStatus, find_run, read_runs
from echo_ops.supervisor.registration import FOLDER_LOCK, folder_lock
from echo_runtime.announcement import forget_gone
from echo_runtime.logins import ADMIN
from echo_schemas.errors import UserError
from echo_schemas.libraries import ANALYSIS, require_libraries
from echo_schemas.records import RunControl, RunState, ordered_state
from echo_settings import Settings

RunId = Annotated[str, typer.Argument(help="The run, as `echoswarm runs list` names it.")]

_MIB = 1 << 20
_SAID = {
    RunState.PAUSED: "No request is written and no step is trained until `echoswarm runs resume {name}`. Work in progress is kept.",
    RunState.STOPPING: "Its learner ends after its step and saves all. `echoswarm runs resume {name}` lets it go on.",
    RunState.RUNNING: "It goes on.",
}
_SAID_WHILE_DOWN = {
    RunState.PAUSED: "No learner of it runs now; one that is started waits until `echoswarm runs resume {name}`.",
    RunState.STOPPING: "No learner of it runs now, and none starts until `echoswarm runs resume {name}`.",
    RunState.RUNNING: "No learner of it runs now: start the run with the command that it was started with.",
}


def list_runs(config: Config = None, as_json: AsJson = False) -> None:
    """Print one line for each run of the namespace, the oldest first."""
    _, bus = _reach(config)
    lines = read_runs(bus)
    if as_json:
        sys.stdout.write(json.dumps([_plain(line) for line in lines]) + "\n")
        return
    if not lines:
        out.print(f"No run was ever accepted in {bus.namespace.name}.", markup=False)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("run", "is", "version", "mode", "task", "started", "last heard"):
        # Columns that tell runs apart are never cut.
        table.add_column(title, no_wrap=title in {"run", "is", "version"})
    now_ms = bus.clock.time_ms()
    for line in lines:
        run = line.run
        started, heard = shown_time(run.created_ms), _heard(line, now_ms)
        table.add_row(run.run_id, line.status.value, _version(line), run.mode.value, run.task, started, heard)
    out.print(table)
    for line in lines:
        if line.status is RunStatus.THROTTLED and line.progress is not None:
            remark(line.run.run_id, [str(line.progress.held)])


def show(name: RunId, config: Config = None) -> None:
    """Print the settings and the state of a run."""
    settings, bus = _reach(config)
    line = find_run(read_runs(bus), name, bus.namespace.name)
    run, progress = line.run, line.progress
    rows = {
        "is": line.status.value,
        "version": _version(line),
        "last heard": _heard(line, bus.clock.time_ms()),
        "started": shown_time(run.created_ms),
        "mode": f"{run.mode.value}, staleness budget {run.staleness_budget}, published every {_steps(run.publication_period)}",
        "task": f"{run.task}, groups of {run.group_size}, {run.groups_per_step} a step, seed {run.seed}",
        "model": run.model,
        "comes from": "nothing" if run.parent_run is None else f"{run.parent_run}, version {run.parent_version}",
        "software": ", ".join(f"{package} {version}" for package, version in run.software.items()),
    }
    if progress is not None:
        if progress.held:
            rows["held back"] = progress.held
        rows["groups"] = f"{progress.groups_trained:,} trained, {progress.groups_dropped:,} dropped, {progress.groups_ready:,} ready"
    if line.order is not None and line.order.run is not None:
        rows["ordered"] = f"{line.order.run.state.value}, by {line.order.issued_by}, {shown_time(line.order.time_ms)}"
    out.print(f"{name} in {bus.namespace.name}", style="bold cyan", markup=False)
    for title, text in rows.items():
        out.print(f"  {title:<11}{text}", markup=False)
    if settings.run.name == name:
        out.print(f"  {'folder':<11}{settings.checkpoint.folder}", markup=False)


def pause(name: RunId, config: Config = None) -> None:
    _order(config, name, RunState.PAUSED)


def resume(name: RunId, config: Config = None) -> None:
    _order(config, name, RunState.RUNNING)


def stop(name: RunId, config: Config = None) -> None:
    _order(config, name, RunState.STOPPING)


def _order(config: Path | None, name: str, state: RunState) -> None:
    settings, bus = _reach(config)
    line = find_run(read_runs(bus), name, bus.namespace.name)
    if state is RunState.STOPPING and settings.run.name == name:
        for process in forget_gone(Path(settings.checkpoint.folder) / "processes"):
            out.print(f"{process} had ended without a farewell: its file is removed, so that no alert waits for it.", markup=False)
    if ordered_state(line.order) is state:
        out.print(f"{name} has that order already: it is {line.status.value}.", markup=False)
        return
    give_order(bus, name, line.order, run=RunControl(state=state))
    said = (_SAID if line.is_alive else _SAID_WHILE_DOWN)[state]
    out.print(f"{name}: ordered. {said.format(name=name)}", markup=False)


def archive(
    name: RunId,
    to: Annotated[Path, typer.Option(help="The folder; the archive is a folder of the run's name in it.")] = Path("archives"),
    weights: Annotated[
        Literal["newest", "all"], typer.Option(help="Keep the chunks of the newest version, or of all versions in the log.")
    ] = "newest",
    config: Config = None,
) -> None:
    """Copy everything of a run that has ended to a folder. Raises UserError for a run that is alive."""
    require_libraries("An archive", "pyarrow", install=ANALYSIS)
    from echo_ops.runs.archive import archive_run

    settings, bus = _reach(config)
    line = find_run(read_runs(bus), run_named(name), bus.namespace.name)
    if line.is_alive:
        raise UserError(
            f"{name} is {line.status.value}: its archive would be incomplete.",
            hint=f"Stop it first: echoswarm runs stop {name}{same_file(config)}",
        )
    home = to / name
    done = archive_run(bus, line.run, home, store=settings.store.uri, all_weights=weights == "all")
    remark("missing", [*done.missing, *_unpublished(line)])
    records = sum(topic.records for topic in done.topics.values())
    rows = ", ".join(f"{count:,} {table}" for table, count in sorted(done.rows.items()))
    kept = "no weights" if done.weights is None else f"the weights of version {done.weights}"
    out.print(f"{name}: {records:,} records, {kept}; exported: {rows}. All of it was read back from {home}.", markup=False)
    # `delete` wants the run's own file; without --config that may be run.toml here.
    own = same_file(config) if settings.run.name == name else " --config FILE (the run's own)"
    out.print(f"It may go from Kafka now: echoswarm runs delete {name} --yes{own}", markup=False)


def _unpublished(line: RunLine) -> list[str]:
    """Says which steps of a stopped run wait for the next publication."""
    progress = line.progress
    if progress is None or progress.version <= progress.published:
        return []
    where = "only the learner's checkpoints have them, and `runs delete` removes those"
    how = f"they come into the log when the run goes on (`echoswarm runs resume {line.run.run_id}`, then start it)"
    return [f"the steps after version {progress.published}, of {progress.version}: {where}; {how}."]


def restore(folder: Annotated[Path, typer.Argument(help="An archive: DIR/NAME of `runs archive`.")], config: Config = None) -> None:
    """Write an archived run to its topics."""
    require_libraries("An archive", "pyarrow", install=ANALYSIS)
    from echo_ops.runs.restore import restore_run

    _, bus = _reach(config, ADMIN)
    done = restore_run(bus, folder)
    records = sum(topic.records for topic in done.topics.values())
    out.print(f"{done.run_id}: {records:,} records are at their old offsets in {done.namespace}; all of them were read back.", markup=False)
    out.print("Its topics keep every record until `echoswarm topics apply` sets the limits of the topic files again.", markup=False)


def delete(name: RunId, config: Config = None, yes: Yes = False) -> None:
    """Print everything that belongs to a run, and with `yes` remove it. Raises UserError for a run that is alive."""
    settings, bus = _reach(config, ADMIN)
    lines = read_runs(bus)
    line = find_run(lines, name, bus.namespace.name)
    if line.is_alive:
        raise UserError(f"{name} is {line.status.value}.", hint=f"Stop it first: echoswarm runs stop {name}{same_file(config)}")
    if settings.run.name != name:
        raise UserError(
            f"The configured run is {settings.run.name!r}: where the checkpoints of {name!r} lie is in its own file.",
            hint=f"Name that file with --config; a demo's is runs/{name}/run.toml.",
        )
    others = [other.run.run_id for other in lines if other is not line]
    remains = find_remains(bus, name, Path(settings.checkpoint.folder), is_alone=not others)
    _say_remains(settings, bus, remains, others)
    if not yes:
        out.print("Nothing was removed. Add --yes.")
        return
    folder = Path(settings.checkpoint.folder)
    # An `echoswarm up` that has begun and whose learner is not there yet.
    with folder_lock(folder) if (folder / FOLDER_LOCK).exists() else nullcontext():
        remove(bus, remains)
    out.print(f"{name} is removed.", markup=False)


def _say_remains(settings: Settings, bus: Bus, remains: Remains, others: list[str]) -> None:
    say = "{:<12}{}".format
    if remains.topics:
        out.print(say("topics", f"{len(remains.topics)}: {remains.topics[0]} … {remains.topics[-1]}, with all records"), markup=False)
    if others:
        out.print(
            say("records", "the newest of " + ", ".join(f"{len(keys)} keys of {name}" for name, keys in remains.keys.items())), markup=False
        )
        out.print(say("", f"The rest goes with retention: {', '.join(others)} is in the same topics."), markup=False)
    if remains.groups:
        out.print(say("groups", ", ".join(remains.groups)), markup=False)
    if remains.acls:
        out.print(
            say("access", f"{len(remains.acls)} entries of access lists below {bus.namespace.name}, so its logins may do nothing more."),
            markup=False,
        )
        out.print(say("", "For another run there: `echoswarm acls render`; on this machine `echoswarm kafka up --secure`."), markup=False)
    elif remains.acls is None:
        out.print(say("access", "no access lists that this login can see"), markup=False)
    for path in remains.paths:
        out.print(say("file", str(path)), markup=False)
    out.print(say("", f"{remains.num_bytes / _MIB:,.1f} MiB in files"), markup=False)
    left = ["transactional ids, which the brokers forget after a week"]
    left += [f"snapshots in {settings.store.uri}"] if settings.store.uri else []
    left += ["subjects of the registry"] if settings.registry.url else []
    out.print(say("left", ", ".join(left)), markup=False)


def _reach(config: Path | None, role: str = "operator") -> tuple[Settings, Bus]:
    settings = read_settings(config)
    return settings, reach_bus(settings, role, all_runs=True)


def _plain(line: RunLine) -> dict[str, object]:
    run, progress = line.run, line.progress
    return {
        "run": run.run_id,
        "standing": line.status.value,
        "version": None if progress is None else progress.version,
        "steps": line.steps,
        "mode": run.mode.value,
        "task": run.task,
        "model": run.model,
        "created_ms": run.created_ms,
        "heard_ms": None if progress is None else progress.time_ms,
        "held": None if progress is None else progress.held,
        "parent_run": run.parent_run,
        "parent_version": run.parent_version,
    }


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


def _version(line: RunLine) -> str:
    if line.progress is None:
        return "none"
    return f"{line.progress.version}" + (f" of {line.steps}" if line.steps else "")


def _heard(line: RunLine, now_ms: int) -> str:
    if line.progress is None:
        return "never"
    if line.is_alive:
        return f"{max(0, now_ms - line.progress.time_ms) / 1000:.0f} s ago"
    return shown_time(line.progress.time_ms)
