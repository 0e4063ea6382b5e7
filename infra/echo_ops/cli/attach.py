"""`echoswarm reward attach`: a reward application beside the run's own, tried before it starts and watched until its first value.

    import ─▶ try on recent trajectories ─▶ say what a backfill costs ─▶ order (`control`) ─▶ `echoswarm run reward` ─▶ first value

The application is a process in the background with a low priority. It outlives this command, and ends when it is detached or the run
is over.

Threads: everything blocks the caller.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_bus.reading.reader import From
from echo_ops.cli.context import config_file, reach_bus, read_settings
from echo_ops.cli.options import Config, RewardPath
from echo_ops.cli.output import out
from echo_ops.cli.reward import attach_order, run_now
from echo_ops.groups import has_members
from echo_ops.harmless import harmless
from echo_ops.rewards.recent import recent_trajectories
from echo_ops.rewards.trial import Trial, try_reward
from echo_replay.rescoring import RESCORE, UNREPEATABLE
from echo_schemas.errors import UserError
from echo_schemas.records import Reward, RewardAttachment, RewardOutcome
from echo_schemas.topics import OWN_APPLICATION, REWARDS
from echo_settings import Settings
from echo_streams.beginning import Since, as_time, num_between, offsets_of, parse_beginning, positions_of
from echo_streams.run import attach as load_attached

_TRIED = 16
_FIRST_VALUE_S = 60.0
_LOOK_S = 0.2
# Added to the niceness of this command: the run on this machine goes first. Not more, since the learner waits for a reward with weight.
_NICE = 5
_LOWEST = 19
_LOG_TAIL = 5
_LEGAL = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9_-]*[a-zA-Z0-9])?")


def attach(
    path: RewardPath,
    config: Config = None,
    beginning: Annotated[
        str | None,
        typer.Option(
            "--from", help="now, beginning, version:120 or a time (UTC). By default its last position; now for a new application."
        ),
    ] = None,
    share: Annotated[float, typer.Option("--sample", min=0.0, max=1.0, help="Share of the groups, always the same ones.")] = 1.0,
    application: Annotated[str | None, typer.Option(help="The application's name; by default the function's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Try it and say what a backfill costs; attach nothing.")] = False,
) -> None:
    """Attach a reward to a running run. Raises UserError, with nothing changed, for a reward that does not work."""
    began_s = time.monotonic()
    settings = read_settings(config)
    (entry,) = load_attached((path,))
    if path in settings.rewards:
        raise UserError(f"{path!r} is in [rewards] of the run's file: the run's own application gives it.")
    application = application or path.rpartition(":")[2].replace(".", "-")
    require_application(application)
    if share <= 0.0:
        raise UserError("--sample 0 scores nothing.", hint="Write a share above 0, such as 0.1.")
    bus = reach_bus(settings)
    group = bus.namespace.group("reward", application)
    if has_members(bus.cluster, group):
        raise UserError(
            f"The application {application!r} is attached already.",
            hint=f"`echoswarm reward detach {application}` ends it; another name is given with --application.",
        )
    trial = try_reward(settings, bus, entry, recent_trajectories(bus, _TRIED))
    say_trial(trial)
    begins = say_beginning(bus, group, beginning, share, trial)
    if dry_run:
        return
    now = run_now(settings, bus)
    order = RewardAttachment(application=application, is_attached=True, rewards=(path,), share=share)
    with closing(bus.reader([REWARDS])) as reader:
        reader.start(otherwise=From.END)
        attach_order(settings, bus, now, order)
        log = Path(settings.checkpoint.folder) / "logs" / f"reward-{application}.log"
        process = _start(settings, config, order, begins, log)
        deadline = Deadline.after(_FIRST_VALUE_S)
        first: Reward | None = None
        while first is None and not deadline.expired():
            if process.poll() is not None:
                attach_order(settings, bus, run_now(settings, bus), replace(order, is_attached=False, rewards=()))
                raise UserError(f"The application {application!r} has ended: {_tail(log)}", hint=f"Its log: {log}")
            first = _first_of(application, [message.record for message in reader.read(timeout_s=_LOOK_S)])
    if first is None:
        out.print(f"{path} is attached; no trajectory has come within {_FIRST_VALUE_S:g} s that it could score.", markup=False)
    else:
        said = f"{first.value:.4g}" if first.value is not None else f"{first.outcome.value}: {harmless(first.error or '')}"
        out.print(f"{path} is attached: its first record after {time.monotonic() - began_s:.1f} s, {said}", markup=False)
    out.print(f"application {application}, process {process.pid}, log {log}; nothing is trained on it", markup=False)


def require_application(name: str) -> None:
    """Raise UserError for a name that cannot be a group's, or is the run's own application's."""
    if not _LEGAL.fullmatch(name) or name in (OWN_APPLICATION, RESCORE, UNREPEATABLE):
        raise UserError(
            f"{name!r} is no name for an application beside the run's own.",
            hint="Give one of letters, digits, '_' and '-' with --application.",
        )


def say_trial(trial: Trial) -> None:
    """Print the result of the trial. Raises UserError if no sample got a value."""
    if not trial.rewards:
        out.print("No trajectory of training is among the newest in the log, so it was not tried.")
        return
    if not trial.values:
        worst = trial.failed[0]
        raise UserError(
            f"It gives no value: {worst.outcome.value}, {worst.error or 'without a reason'} ({len(trial.rewards)} samples tried).",
            hint="Nothing was attached. `echoswarm reward test` shows more.",
        )
    pace = "" if trial.s_per_sample is None else f", {trial.s_per_sample:.2g} s a sample"
    out.print(f"Tried on {len(trial.rewards)} recent trajectories: {len(trial.values)} values{pace}", markup=False)
    say_cached(trial.num_cached, len(trial.rewards))
    if trial.failed:
        first = trial.failed[0]
        out.print(
            f"  {len(trial.failed)} got none; the first: {first.outcome.value}, {harmless(first.error or '')}", style="yellow", markup=False
        )


def say_cached(num_cached: int, num: int) -> None:
    """Print how many of `num` tried samples a judge's cache answered, if any: others take longer, and cost something."""
    if num_cached:
        what = "others take longer, and what they cost is not known" if num_cached == num else "others take longer"
        out.print(f"  {num_cached} of {num} tried samples were answered by the judge's cache; {what}", style="yellow")


def say_beginning(bus: Bus, group: str, beginning: str | None, share: float, trial: Trial) -> str:
    """Print how many older trajectories the application has to score, and what that costs.

    Returns where the application begins; empty: at its last position. Raises UserError for a `beginning` that cannot be parsed.
    """
    known = positions_of(bus, group) if beginning is None else {}
    text = beginning or Since.NOW.value
    begins = "" if known else as_time(bus, parse_beginning(text))
    total = num_between(bus, known or offsets_of(bus, parse_beginning(begins)))
    if begins == Since.NOW or (not total and known):
        return begins
    num = round(total * share)
    cost = "" if trial.s_per_sample is None else f", about {max(1, round(num * trial.s_per_sample)):,} s of scoring"
    cost += f" and ${num * trial.usd_per_sample:,.2f}" if trial.usd_per_sample else ""
    what = "It goes on at its last position" if known else f"From {text}"
    of = "" if share >= 1.0 else f" ({share:.0%} of {total:,})"
    out.print(f"{what}: {num:,} trajectories{of}{cost}", markup=False)
    return begins


def _start(settings: Settings, config: Path | None, order: RewardAttachment, beginning: str, log: Path) -> subprocess.Popen[bytes]:
    """Start the application in a session of its own, so that Ctrl-C here does not reach it."""
    file, application = config_file(config), order.application
    announce = Path(settings.checkpoint.folder) / "processes" / f"reward-{application}.json"
    command = [sys.executable, "-m", "echo_ops.cli", "run", "reward", "--application", application, "--name", application]
    command += ["--reward", order.rewards[0], "--sample", str(order.share), "--ends-with-run"]
    command += ["--announce", str(announce), "--log-file", str(log)]
    command += ["--from", beginning] if beginning else []
    command += ["--config", str(file)] if file is not None else []
    # A function that hangs must hang in a process that can be killed. The run itself uses its port for metrics.
    environ = {"ECHO_SCORING__PROCESSES": str(max(1, settings.scoring.processes)), "ECHO_METRICS__PORT": "0"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(
            command, env={**os.environ, **environ}, stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True
        )  # fmt: skip
    os.setpriority(os.PRIO_PROCESS, process.pid, min(_LOWEST, os.getpriority(os.PRIO_PROCESS, 0) + _NICE))
    return process


def _first_of(application: str, records: list[object]) -> Reward | None:
    """The first record of the application with a value, else its first record."""
    said = [record for record in records if isinstance(record, Reward) and record.application == application]
    return next((each for each in said if each.outcome is RewardOutcome.SCORED), said[0] if said else None)


def _tail(log: Path) -> str:
    """The last lines of the process's standard error."""
    errors = log.with_suffix(".err")
    text = errors.read_text(encoding="utf-8", errors="replace").strip() if errors.exists() else ""
    return " ".join(text.splitlines()[-_LOG_TAIL:]) or "it says nothing"
