"""`echoswarm reward test|new|list|weight|detach`: rewards of a running run. `attach` and `compare` have modules of their own.

Orders travel on `control` with a growing epoch. The learner obeys an order about weights, an application the order to end.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

import typer

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_learner.commit.session import read_tip
from echo_learner.training.config import reward_terms
from echo_ops.cli.context import reach_bus, read_settings
from echo_ops.cli.options import AsJson, Config, RewardPath
from echo_ops.cli.output import aligned, out
from echo_ops.groups import has_members
from echo_ops.harmless import harmless
from echo_ops.orders import give_order
from echo_ops.rewards.recent import recent_trajectories
from echo_ops.rewards.template import write_template
from echo_ops.rewards.trial import Trial, try_reward
from echo_ops.rewards.watch import RecentRewards, ScorerLine, ScorerState, ScorerWatch, behind_words, plain_line
from echo_ops.rewards.weights import Missing, full_name, listed, parse_missing, parse_weight, policy_of, terms_in_force, with_weight
from echo_replay.run_log import unknown_run
from echo_schemas.errors import UserError
from echo_schemas.records import Control, Progress, Reward, RewardAttachment, RewardControl, RewardTerm, Run
from echo_schemas.topics import OWN_APPLICATION, PROGRESS, RUNS, attachment_key
from echo_settings import Settings
from echo_streams.run import attach as load_attached

_END_S = 30.0
_LOOK_S = 0.2
# A name has a recent value if its newest value is at most this much older than the newest value of all names.
_RECENT_MS = 60_000
_MOST_HEARD = 500
_SHOWN = 5
_SHOWN_LENGTH = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """State of the run: the learner's version, the reward terms of its next batch, and the orders of `control` by key."""

    version: int
    terms: tuple[RewardTerm, ...]
    orders: Mapping[str, Control]
    weights: Control | None = None
    """The newest order about weights."""

    @property
    def pending(self) -> RewardControl | None:
        """Weights that are ordered for a version after the next."""
        order = None if self.weights is None else self.weights.rewards
        return order if order is not None and order.from_version > self.version + 1 else None


def try_out(
    path: RewardPath,
    config: Config = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many of the newest trajectories.")] = 200,
) -> None:
    """Call the reward on the newest trajectories and print its values. Raises UserError if one got no value, or there is no trajectory."""
    settings = read_settings(config)
    (entry,) = load_attached((path,))
    bus = reach_bus(settings)
    items = recent_trajectories(bus, last)
    if not items:
        raise UserError(
            f"No trajectory of training of {settings.run.name!r} is among the newest in the log.",
            hint="Start the run, name its file with --config, or look further back with --last.",
        )
    trial = try_reward(settings, bus, entry, items)
    show_trial(path, trial)
    if trial.failed:
        raise UserError(f"{len(trial.failed)} of {len(trial.rewards)} samples got no value.", hint="Nothing was written to the run.")


def new(path: Annotated[str, typer.Argument(metavar="FILE:NAME")] = "my_rewards.py:brevity") -> None:
    """Write a reward and its test. Raises UserError if a file exists already."""
    file, written = write_template(path)
    name = path.partition(":")[2] or "brevity"
    out.print(f"Written: {file} and {written}", markup=False)
    out.print(f"Next: `pytest {written}`, `echoswarm reward test {file}:{name}`, `echoswarm reward attach {file}:{name}`", markup=False)


def list_rewards(config: Config = None, as_json: AsJson = False) -> None:
    """Print a line for each reward of the run, attached ones included."""
    settings = read_settings(config)
    bus = reach_bus(settings)
    now = run_now(settings, bus)
    with closing(ScorerWatch(bus)) as watch:
        found = watch.look(now.terms, now.orders, now.version, _MOST_HEARD)
    lines = [line for line in found if line.state is not ScorerState.DETACHED]
    if as_json:
        out.print_json(data=[plain_line(line) for line in lines])
        return
    if not lines:
        out.print(f"No reward scores the run {settings.run.name} yet.", markup=False)
        return
    _show_lines(lines)
    if (pending := now.pending) is not None:
        out.print(f"Ordered from version {pending.from_version} on: {listed(pending.terms)}", markup=False)
    out.print(f"The run is at version {now.version}, trained on {listed(now.terms)}.", markup=False)


def weigh(
    weight: Annotated[str, typer.Argument(metavar="NAME=WEIGHT", help="Such as brevity=0.2; 0 trains without it.")],
    config: Config = None,
    from_version: Annotated[
        int | None, typer.Option("--from-version", min=1, help="The first version trained with it; by default the next.")
    ] = None,
    missing: Annotated[
        str | None, typer.Option(help="While its value is missing: wait (then drop), without, or a value in its place. By default wait.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(min=0.0, help="Seconds that a group waits; by default [scoring] deadline_s.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also for a reward that no application gives now.")] = False,
) -> None:
    """Order another weight. Raises UserError for a name that no application scores, and where groups would wait in vain."""
    asked, wanted = parse_weight(weight)
    settings = read_settings(config)
    wait_s = settings.scoring.deadline_s if deadline is None else deadline
    policy = None if missing is None and deadline is None else parse_missing(missing or "wait", wait_s)
    bus = reach_bus(settings)
    now = run_now(settings, bus)
    with closing(ScorerWatch(bus)) as watch:
        watch.listen(_MOST_HEARD)
        heard = of_attached(watch.heard, now)
    known = {name for _, name in heard} | {term.name for term in now.terms}
    name = asked if force and asked not in {each.rpartition(":")[2] for each in known} else full_name(asked, known)
    if wanted and not force:
        refuse_unscored(name, heard)
        refuse_sampled(name, now, policy)
    terms = with_weight(now.terms, name, wanted, policy, wait_s)
    starts = max(from_version or 0, now.version + 1)
    if (pending := now.pending) is not None:
        out.print(f"This replaces the order for version {pending.from_version}: {listed(pending.terms)}.", markup=False)
    give_order(bus, settings.run.name, now.weights, rewards=RewardControl(from_version=starts, terms=terms))
    (term,) = (term for term in terms if term.name == name)
    begun = "" if starts > now.version + 1 else " (from the next, if that step has begun)"
    out.print(f"From version {starts} on{begun} the run is trained on {listed(terms)}; for {name} {policy_of(term)}.", markup=False)


def detach(
    name: Annotated[str, typer.Argument(help="The reward's name, or its application's.")],
    config: Config = None,
    force: Annotated[bool, typer.Option("--force", help="Also while the run is trained on it.")] = False,
) -> None:
    """End the application of an attached reward, remove the reward from the terms, and wait until the application has ended.

    Raises UserError for a reward that still has weight, and for an application that does not end.
    """
    settings = read_settings(config)
    bus = reach_bus(settings)
    now = run_now(settings, bus)
    with closing(ScorerWatch(bus)) as watch:
        lines = watch.look(now.terms, now.orders, now.version, _MOST_HEARD)
    line = _line_of(name, [line for line in lines if line.application != OWN_APPLICATION and line.state is not ScorerState.DETACHED])
    ended = [each for each in lines if each.application == line.application]
    weighted = [each for each in ended if not each.is_shadow]
    if weighted and not force:
        raise UserError(
            f"{weighted[0].name!r} is trained on with weight {weighted[0].weight:g}: without its application {weighted[0].policy}.",
            hint=f"Take its weight first: `echoswarm reward weight {weighted[0].name}=0`.",
        )
    names = tuple(each.name for each in ended)
    attach_order(settings, bus, now, RewardAttachment(application=line.application, is_attached=False, rewards=names, share=line.share))
    left = tuple(term for term in now.terms if term.weight or term.name not in names)
    if left != now.terms and not force:
        give_order(bus, settings.run.name, now.weights, rewards=RewardControl(from_version=now.version + 1, terms=left))
    group, deadline = bus.namespace.group("reward", line.application), Deadline.after(_END_S)
    while has_members(bus.cluster, group):
        if deadline.expired():
            raise UserError(
                f"The application {line.application!r} was ordered to end and has not ended within {_END_S:g} s.",
                hint="The order stays. See its log: does the process answer?",
            )
        time.sleep(_LOOK_S)
    out.print(f"{line.name} is detached: its application {line.application} has ended; what it wrote stays in the log.", markup=False)


def attach_order(settings: Settings, bus: Bus, now: RunNow, attachment: RewardAttachment) -> None:
    """Order that an application begins or ends."""
    key = attachment_key(settings.run.name, attachment.application)
    give_order(bus, settings.run.name, now.orders.get(key), attachment=attachment)


def run_now(settings: Settings, bus: Bus) -> RunNow:
    """The state of the run. Raises UserError for a run that was never accepted; TransportError."""
    run_id = settings.run.name
    tip = read_tip(bus, run_id)
    progress = bus.newest(PROGRESS, Progress).get(run_id)
    if tip.report is None and progress is None and not bus.newest(RUNS, Run, only=run_id):
        raise unknown_run(bus, run_id)
    version = tip.version if progress is None else max(tip.version, progress.version)
    with closing(bus.orders()) as view:
        orders = view.items()
    order = orders.get(f"{run_id}/rewards")
    reported = reward_terms(settings) if tip.report is None else tip.report.reward_terms
    terms = terms_in_force(reported, None if order is None else order.rewards, version)
    return RunNow(version=version, terms=terms, orders=orders, weights=order)


def of_attached(heard: Mapping[tuple[str, str], RecentRewards], now: RunNow) -> dict[tuple[str, str], RecentRewards]:
    """`heard` without the applications that were detached: nothing more comes of them."""
    attachments = [order.attachment for order in now.orders.values() if order.attachment is not None]
    detached = {each.application for each in attachments if not each.is_attached}
    return {pair: each for pair, each in heard.items() if pair[0] not in detached}


def refuse_unscored(name: str, heard: Mapping[tuple[str, str], RecentRewards]) -> None:
    """Raise UserError unless `name` got a value lately: without one every group would wait for it."""
    newest_ms = max((each.scored_ms for each in heard.values()), default=0)
    said = [each for (_, by), each in heard.items() if by == name]
    if any(each.scored_ms and newest_ms - each.scored_ms <= _RECENT_MS for each in said):
        return
    why = next((f" It says: {each.error}" for each in said if each.error), "")
    raise UserError(
        f"No application gives {name!r} a value now, and groups would wait for it.{why}",
        hint="See `echoswarm reward list`; attach it, or mend it, first. --force sets the weight all the same.",
    )


def refuse_sampled(name: str, now: RunNow, policy: Missing | None) -> None:
    """Raise UserError if the reward is attached to a share of the groups, and the other groups would wait for it."""
    given = [order.attachment for order in now.orders.values() if order.attachment is not None and name in order.attachment.rewards]
    partial = [each for each in given if each.is_attached and each.share < 1.0]
    if partial and (policy is None or (policy.required and policy.default is None)):
        raise UserError(
            f"{name!r} is attached to {partial[0].share:.0%} of the groups only: the others would wait for it in vain.",
            hint="Detach it and attach it without --sample; or let the others go on: --missing without, or --missing 0.",
        )


def _line_of(asked: str, lines: Sequence[ScorerLine]) -> ScorerLine:
    """The line of an application or a reward. Raises UserError."""
    for line in lines:
        if asked == line.application:
            return line
    by_name = {line.name: line for line in lines}
    if not by_name:
        raise UserError("No reward is attached.", hint="`echoswarm reward list` shows what scores the run.")
    try:
        return by_name[full_name(asked, by_name)]
    except UserError as exc:
        raise UserError(f"No reward {asked!r} is attached.", hint=f"Attached: {', '.join(sorted(by_name))}.") from exc


def show_trial(path: str, trial: Trial) -> None:
    """Print the values of a trial: moments, groups, the slowest calls, and the failed ones by error."""
    values, seconds = trial.values, sorted(each.seconds for each in trial.rewards)
    failed = Counter((each.outcome.value, each.error or "") for each in trial.failed)
    out.print(f"{path}: {len(values)} of {len(trial.rewards)} samples scored", markup=False)
    if values:
        spread = statistics.pstdev(values)
        out.print(f"  values   mean {statistics.fmean(values):.4g}, std {spread:.4g}, from {min(values):.4g} to {max(values):.4g}")
        groups: dict[str, list[float]] = {}
        for each in trial.rewards:
            if each.value is not None:
                groups.setdefault(each.group_id, []).append(each.value)
        several = [found for found in groups.values() if len(found) > 1]
        if several:
            flat = sum(len(set(found)) == 1 for found in several)
            out.print(f"  groups   {flat} of {len(several)} give no signal: all their samples are worth the same")
        out.print(f"  seconds  median {statistics.median(seconds):.2g}, slowest {seconds[-1]:.2g} a call", markup=False)
        if trial.usd_per_sample:
            out.print(f"  cost     ${trial.usd_per_sample:.2g} a sample", markup=False)
    by_place = {item.at: item for item in trial.items}

    def row(kind: str, reward: Reward) -> tuple[str, ...]:
        value = "–" if reward.value is None else f"{reward.value:.4g}"
        sample = f"{reward.group_id} [{reward.index}] {by_place[reward.of].trajectory.completion!r}"
        return kind, f"{reward.seconds:.2g}", value, _cut(sample)

    scored = [each for each in trial.rewards if each.value is not None]
    slowest = sorted(scored, key=lambda each: -each.seconds)[:_SHOWN]
    rows = [row("slowest", each) for each in slowest] + [row("failing", each) for each in trial.failed[:_SHOWN]]
    _show_rows([("", "seconds", "value", "sample"), *rows])
    for (outcome, error), count in failed.most_common(_SHOWN):
        out.print(f"  {count} {outcome}: {harmless(error)}", style="red", markup=False)


def _show_lines(lines: Sequence[ScorerLine]) -> None:
    rows = [
        (
            line.name,
            line.application,
            f"{line.weight:g}",
            line.state.value if line.share >= 1.0 else f"{line.state.value}, {line.share:.0%} of the groups",
            behind_words(line.behind),
            "–" if line.mean is None else f"{line.mean:.3f}",
            f"{line.num_scored:,}",
            f"{line.num_failed:,}",
            f"{line.num_stale:,}",
            line.policy,
        )
        for line in lines
    ]
    _show_rows([_HEADS, *rows])
    for line in lines:
        if line.num_failed and line.error:
            out.print(f"{line.name}: {harmless(line.error)}", style="yellow", markup=False)


_HEADS = ("reward", "application", "weight", "state", "behind", "mean", "scored", "failed", "stale", "while it does not come")


def _show_rows(rows: Sequence[tuple[str, ...]]) -> None:
    """The first row is dim."""
    for number, line in enumerate(aligned(rows)):
        out.print(f"  {line}", style="" if number else "dim", markup=False)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_LENGTH else f"{text[: _SHOWN_LENGTH - 1]}…"
