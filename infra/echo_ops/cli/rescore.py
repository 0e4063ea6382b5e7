"""`echoswarm rescore`: score a range of the past with another reward, into the topic `rewards` under a new name or into a folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from echo_bus.bus import Bus
from echo_ops.cli.attach import say_cached
from echo_ops.cli.compare import lines_of
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import Config, RewardPath, RunName, in_range
from echo_ops.cli.output import out, remark
from echo_ops.cli.past import history_of, nothing_selected, run_named
from echo_ops.cli.reward import run_now
from echo_ops.harmless import harmless
from echo_ops.ranges import RangeOptions, selection_of
from echo_ops.rewards.comparison import compare_columns
from echo_ops.rewards.recent import newest_rewards
from echo_ops.rewards.weights import full_name
from echo_replay.history import History
from echo_replay.rescoring import RESCORE, UNREPEATABLE
from echo_replay.rescoring.inside import ScoringTask
from echo_replay.rescoring.order import RescoreOrder
from echo_replay.rescoring.rescorer import Estimate, NoSampleScored, Rescored
from echo_replay.rescoring.rescorer import rescore as score_again
from echo_replay.rescoring.sinks import RewardSink, folder_rewards, topic_rewards
from echo_replay.rescoring.team import Team
from echo_replay.selection import Selection
from echo_schemas.errors import UserError
from echo_schemas.libraries import ANALYSIS, require_libraries
from echo_schemas.topics import OWN_APPLICATION, REWARDS
from echo_settings import Settings
from echo_streams.run import all_rewards
from echo_streams.run import attach as load_attached
from echo_tasks.rewards import RewardFunction, RewardKind

ROLE = "rescore"
# Records of each partition of `rewards` that are read to learn which application gives a name.
_NEWEST = 500
_SHOWN = 5
# Reading, sending and writing one sample, without the function itself.
_AROUND_CALL_S = 0.0001


@in_range
def rescore(
    path: RewardPath,
    config: Config = None,
    run: RunName = "",
    into: Annotated[str, typer.Option(metavar="rewards|FOLDER", help="The topic rewards, or a folder of Parquet files.")] = REWARDS.name,
    name: Annotated[str, typer.Option(help="The reward's name in the records; by default REWARD as it is typed.")] = "",
    against: Annotated[str, typer.Option(metavar="NAME", help="Compare it with this reward; by default with the run's first.")] = "",
    processes: Annotated[int, typer.Option(min=1, max=64, help="Scoring processes.")] = 2,
    *,
    options: RangeOptions,
    force: Annotated[bool, typer.Option("--force", help="Also for a reward with repeatable = False.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Score a few, say what all of it costs, and write nothing.")] = False,
) -> None:
    """Score the range, print the result, and compare. Raises UserError, with nothing written, for a name that another application gives."""
    settings = read_settings(config)
    run_id = run_named(run or settings.run.name)
    settings = settings.model_copy(update={"run": settings.run.model_copy(update={"name": run_id})})
    (entry,) = load_attached((path,))
    if not force:
        _require_repeatable(path, entry.function)
    bus = replace(reach_bus(settings, ROLE), run_id=run_id)
    selection = selection_of(options, run_id, bus.clock.time_ms())
    given = _given(bus)
    name = name or path
    if into == REWARDS.name:
        _require_free(name, settings, bus, given, entry.function.version)
    others = [*settings.rewards, *(each for _, each in given)]
    order = RescoreOrder(
        run_id=run_id,
        name=name,
        code_version=entry.function.version,
        application=RESCORE if entry.function.repeatable else UNREPEATABLE,
        compared=full_name(against, set(others)) if against else next((each for each in others if each != name), ""),
    )
    task = ScoringTask(path=path, order=order, settings=settings)
    # An asynchronous function waits more than it computes, and its limits (calls a second, cost) hold within one process.
    num = 1 if entry.function.kind is RewardKind.ASYNC else processes
    with history_of(bus, run_id) as history, _sink(into, bus, order) as sink:
        _score(task, into, history, selection, Team(task, entry.function, num), sink, dry_run=dry_run)


def _score(task: ScoringTask, into: str, history: History, selection: Selection, team: Team, sink: RewardSink, *, dry_run: bool) -> None:
    bus, order = history.bus, task.order
    lanes = task.settings.scoring.concurrency if team.num_processes == 1 and team.is_async else team.num_processes

    def say(estimate: Estimate) -> bool:
        remark("missing", history.missing)
        num = history.num_planned
        seconds = num * (estimate.call_s / max(1, estimate.num) / lanes + _AROUND_CALL_S)
        cost = f" and ${num * estimate.cost_usd / max(1, estimate.num - estimate.num_cached):,.2f}" if estimate.cost_usd else ""
        out.print(f"At most {num:,} trajectories, about {max(1, round(seconds)):,} s{cost}", markup=False)
        say_cached(estimate.num_cached, estimate.num)
        return not dry_run

    records = history.undecoded(selection, answered=order.name)
    begun_s = bus.clock.monotonic_s()
    try:
        with team:
            done = score_again(order, records, team, sink, codec=bus.codec, clock=bus.clock, tried=say)
    except NoSampleScored as exc:
        raise UserError(
            f"{task.path} gives no value: {exc.answer.error} ({exc.num} samples tried).",
            hint="Nothing was written. `echoswarm reward test` shows more.",
        ) from exc
    if dry_run:
        out.print("Nothing was written.")
        return
    _report(into, order, done, bus.clock.monotonic_s() - begun_s, team.num_replaced)


def _report(into: str, order: RescoreOrder, done: Rescored, seconds: float, num_replaced: int) -> None:
    """Print the result. Raises UserError if scoring stopped early, or the range is empty."""
    if not done.num_written and not done.num_known:
        raise nothing_selected()
    said = ", ".join(f"{count:,} {outcome.value}" for outcome, count in sorted(done.outcomes.items())) or "nothing new"
    beside = [
        f"{count:,} {what}"
        for count, what in (
            (done.num_known, "had a record already"),
            (done.num_probes, "are probes"),
            (done.num_unreadable, "cannot be read"),
            (num_replaced, "times a scoring process was replaced"),
        )
        if count
    ]
    cost = f", ${done.cost_usd:,.4g}" if done.cost_usd else ""
    out.print(f"{order.name} into {into}: {said} in {seconds:.1f} s{cost}{'; ' if beside else ''}{', '.join(beside)}", markup=False)
    for error, count in done.errors.most_common(_SHOWN):
        out.print(f"  {count:,} without a value: {harmless(error)}", style="red", markup=False)
    new, other, members = done.table.columns()
    both = ~np.isnan(other)
    found = compare_columns(other[both], new[both], members[both], num_a=done.table.num_other, num_b=len(new))
    if found is not None:
        for line in lines_of(order.compared, order.name, found):
            out.print(line, markup=False)
    elif len(new):
        out.print(f"values: mean {new.mean():.4g}, std {new.std():.4g}, from {new.min():.4g} to {new.max():.4g}", markup=False)
    if done.stopped:
        raise UserError(
            f"{done.stopped} The rest was not scored.", hint="Mend it and type the same command: existing records stay as they are."
        )


@contextmanager
def _sink(into: str, bus: Bus, order: RescoreOrder) -> Iterator[RewardSink]:
    if into == REWARDS.name:
        with topic_rewards(bus, order.run_id, order.name) as topic:
            yield topic
        return
    require_libraries("A folder of rewards", "pyarrow", install=ANALYSIS)
    with folder_rewards(Path(into), bus, order.run_id, (order.name, order.code_version)) as folder:
        yield folder


def _require_repeatable(path: str, function: RewardFunction) -> None:
    if not function.repeatable:
        raise UserError(
            f"{path} says that it cannot be repeated (repeatable = False): its value today may differ from its value then.",
            hint=f"--force scores all the same; the records then name {UNREPEATABLE!r} as their application.",
        )


def _given(bus: Bus) -> Mapping[tuple[str, str], set[str]]:
    """(application, name) → code versions, of the newest rewards of the run. Raises TransportError."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for reward in newest_rewards(bus, _NEWEST):
        found[reward.application, reward.name].add(reward.code_version)
    return found


def _require_free(name: str, settings: Settings, bus: Bus, given: Mapping[tuple[str, str], set[str]], version: str) -> None:
    """Raise UserError for a name that an application gives or gave lately, or that holds scores of another code version."""
    now = run_now(settings, bus)
    attached = {
        each: order.attachment.application
        for order in now.orders.values()
        if order.attachment is not None and order.attachment.is_attached
        for each in order.attachment.rewards
    }
    ours = (RESCORE, UNREPEATABLE)
    by = next(
        (application or OWN_APPLICATION for application, each in given if each == name and application not in ours), attached.get(name, "")
    )
    if name in all_rewards(settings) or name in {term.name for term in now.terms}:
        by = by or OWN_APPLICATION
    hint = f"Give it another one: --name {name.rpartition(':')[2]}-{version}."
    if by:
        raise UserError(f"The name {name!r} is taken: the application {by!r} gives it, and the first value of a name counts.", hint=hint)
    other = {each for (application, given_name), found in given.items() if given_name == name for each in found} - {version}
    if other:
        raise UserError(f"The name {name!r} holds scores of version {sorted(other)[0]!r}; this is version {version!r}.", hint=hint)
