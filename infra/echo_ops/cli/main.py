"""The commands and their options. Each body imports what it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from echo_ops.cli.cluster import commands as cluster
from echo_ops.cli.history import commands as history
from echo_ops.cli.options import Config
from echo_ops.cli.output import user_errors
from echo_ops.roles import Flags, Role


class _Commands(TyperGroup):
    """Every command ends with one sentence where the project's own errors end it."""

    def invoke(self, ctx: Any) -> Any:
        with user_errors():
            return super().invoke(ctx)


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)
reward = typer.Typer(no_args_is_help=True, help="Rewards of a run that is going: write, try, attach, weigh, detach.")
checkpoints = typer.Typer(no_args_is_help=True, help="The checkpoints of a run: what there is, and what nobody needs any more.")
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(reward, name="reward")
# Without a name its commands are the application's own.
for commands in (cluster, history):
    app.add_typer(commands)


@app.callback()
def _root() -> None:
    """EchoSwarm: reinforcement-learning post-training of language models as a streaming pipeline on Apache Kafka."""


@checkpoints.command("list")
def checkpoints_list(config: Config = None) -> None:
    """Print every checkpoint in the run's folder with its size, and what it is to the run in the log."""
    from echo_ops.cli import checkpoints as commands

    commands.list_checkpoints(config)


@checkpoints.command("prune")
def checkpoints_prune(
    config: Config = None,
    keep: Annotated[int | None, typer.Option(min=1, help="Newest of the run to keep, instead of [checkpoint] keep.")] = None,
    unreadable: Annotated[bool, typer.Option("--unreadable", help="Also what cannot be read and is older than the log's newest.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
) -> None:
    """Remove checkpoints of the run that came to nothing or are older than the newest few. Safe beside a running learner."""
    from echo_ops.cli import checkpoints as commands

    commands.prune(config, keep=keep, unreadable=unreadable, dry_run=dry_run)


RewardPath = Annotated[str, typer.Argument(metavar="REWARD", help="my_rewards.py:brevity, package.module:function, or a built-in name.")]


@reward.command("new")
def reward_new(path: Annotated[str, typer.Argument(metavar="FILE:NAME")] = "my_rewards.py:brevity") -> None:
    """Write a reward function and a test of it, to begin with."""
    from echo_ops.cli import reward as commands

    commands.new(path)


@reward.command("test")
def reward_test(
    path: RewardPath,
    config: Config = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many of the newest trajectories.")] = 200,
) -> None:
    """Call it on the run's newest trajectories and show what it says; nothing is written. Exit 2 if a sample got no value."""
    from echo_ops.cli import reward as commands

    commands.test(config, path, last)


@reward.command("attach")
def reward_attach(
    path: RewardPath,
    config: Config = None,
    beginning: Annotated[
        str | None,
        typer.Option("--from", help="now, beginning, version:120 or a time (UTC). By default where it was, a new one now."),
    ] = None,
    share: Annotated[float, typer.Option("--sample", min=0.0, max=1.0, help="Share of the groups, always the same ones.")] = 1.0,
    application: Annotated[str | None, typer.Option(help="The application's name; by default the function's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Try it and say what a backfill costs; attach nothing.")] = False,
) -> None:
    """Score the run with it from now on, in a process of its own beside the run; nothing is trained on it before it has a weight."""
    from echo_ops.cli import attach as commands

    asked = commands.Asked(path=path, beginning=beginning, share=share, application=application, dry_run=dry_run)
    commands.attach(config, asked)


@reward.command("weight")
def reward_weight(
    weight: Annotated[str, typer.Argument(metavar="NAME=WEIGHT", help="Such as brevity=0.2; 0 trains without it.")],
    config: Config = None,
    from_version: Annotated[
        int | None, typer.Option("--from-version", min=1, help="The first version trained so; by default the next.")
    ] = None,
    missing: Annotated[
        str | None, typer.Option(help="While it does not come: wait (then drop), without, or a value that stands in. By default wait.")
    ] = None,
    deadline: Annotated[float | None, typer.Option(min=0.0, help="Seconds that a group waits; by default [scoring] deadline_s.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Also for a reward that nobody gives now.")] = False,
) -> None:
    """Train on a reward with another weight from a version on, without a restart; the others stay as they are."""
    from echo_ops.cli import reward as commands

    commands.weigh(config, weight, from_version=from_version, missing=missing, deadline_s=deadline, force=force)


@reward.command("list")
def reward_list(config: Config = None, as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> None:
    """Say of each reward of the run who gives it, how far behind, what it says, and what groups do while it does not come."""
    from echo_ops.cli import reward as commands

    commands.list_rewards(config, as_json=as_json)


@reward.command("compare")
def reward_compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A reward of the run.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    config: Config = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="How many of the newest records of each partition.")] = 5000,
) -> None:
    """Say how far two rewards agree on the same samples, and what training on the one in place of the other would change."""
    from echo_ops.cli import compare as commands

    commands.compare(config, first, second, last)


@reward.command("detach")
def reward_detach(
    name: Annotated[str, typer.Argument(help="The reward's name, or its application's.")],
    config: Config = None,
    force: Annotated[bool, typer.Option("--force", help="Also while the run is trained on it.")] = False,
) -> None:
    """End the application of an attached reward, wherever it runs. What it wrote stays in the log."""
    from echo_ops.cli import reward as commands

    commands.detach(config, name, force=force)


@app.command("tail")
def tail(
    topic: Annotated[str, typer.Argument(help="Logical topic, such as trajectories, or trajectories.dlq.")],
    config: Config = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as records come.")] = False,
    last: Annotated[int, typer.Option("--last", "-n", help="How many of the newest records of each partition to begin with.")] = 10,
    version: Annotated[int | None, typer.Option(help="Only records whose oldest version is this.")] = None,
    group: Annotated[str | None, typer.Option(help="Only this group id.")] = None,
    worker: Annotated[str | None, typer.Option(help="Only this worker.")] = None,
    all_runs: Annotated[bool, typer.Option("--all-runs", help="Other runs' records too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,
) -> None:
    """Print decoded records with their keys and headers."""
    from echo_ops.cli import tail as commands

    filters = commands.Filters(version=version, group=group, worker=worker)
    commands.tail(config, topic, filters, follow=follow, last=last, all_runs=all_runs, as_json=as_json)


@app.command("settings")
def settings() -> None:
    """Print every setting with type, default and meaning, as the Markdown of docs/settings.md."""
    from echo_ops.cli import settings as commands

    commands.settings()


@app.command("doctor")
def doctor(config: Config = None) -> None:
    """What is installed, reachable, mis-sized or drifted, and how to mend it; exit 1 if something must be mended."""
    from echo_ops.cli import doctor as commands

    commands.doctor(config)


@app.command("check")
def check(
    config: Config = None,
    answer_tokens: Annotated[float | None, typer.Option(min=1, help="Of a mean answer; without it half of max_new_tokens.")] = None,
    prompt_tokens: Annotated[float | None, typer.Option(min=1, help="Of a mean prompt; without it 256.")] = None,
    mbit_s: Annotated[float, typer.Option(min=0.001, help="Mbit/s of a worker's line.")] = 1000.0,
) -> None:
    """Say what a run's file needs (memory, time, bytes, what to rent) and everything in it that will not work, before anything starts."""
    from echo_ops.cli import check as commands
    from echo_ops.estimate import Assumed

    commands.check(config, Assumed(answer_tokens=answer_tokens, prompt_tokens=prompt_tokens, mbit_s=mbit_s))


@app.command("plan")
def plan(
    from_run: Annotated[
        Path | None, typer.Option("--from-run", metavar="FOLDER", help="Take the numbers that a run has measured from its summary.json.")
    ] = None,
    train_s: Annotated[float | None, typer.Option("--train-s", help="Seconds of a training step, without waiting.")] = None,
    broadcast_s: Annotated[
        float | None, typer.Option("--broadcast-s", help="Seconds from a published snapshot until workers generate with it.")
    ] = None,
    rollouts: Annotated[int | None, typer.Option(help="Rollouts of a step: groups per step times group size.")] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(
            "--kind",
            metavar="NAME:rate=R,price=P,count=N",
            help="Workers of one kind: rollouts per second and price per hour of each, and how many there are. Repeatable.",
        ),
    ] = None,
    budget: Annotated[str, typer.Option(metavar="S,S,…", help="Staleness budgets to plan for.")] = "3",
    kappa: Annotated[str, typer.Option(metavar="N|auto", help="Steps between publications; auto: what needs the cheapest pool.")] = "auto",
    gamma: Annotated[float, typer.Option(help="Safety factor on the rate that is needed.")] = 1.1,
    learner_price: Annotated[
        float | None, typer.Option("--learner-price", help="Of the learner's machines together, per hour; as in the run of --from-run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    page: Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write one HTML page with the curves.")] = None,
) -> None:
    """Say how many workers a run needs, which ones, what a step and an accuracy cost; exit 1 if no plan works. Starts nothing."""
    from echo_ops.cli import plan as commands

    given = commands.Given(
        train_s=train_s, broadcast_s=broadcast_s, rollouts=rollouts, kinds=tuple(kind or ()), budgets=budget, kappa=kappa
    )
    commands.plan(from_run, given, gamma=gamma, learner_price=learner_price, as_json=as_json, page=page)


@app.command("simulate")
def simulate(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="The scenario, a TOML file (docs/simulate.md).")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="ECHO-2's figures and table 2 instead of a scenario.")] = False,
    compare: Annotated[
        Literal["policies", "budgets"] | None, typer.Option(help="The scenario under four policies for old samples, or under six budgets.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps that are counted, instead of the file's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of all that is drawn, instead of the file's.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
    page: Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write one HTML page with the curves.")] = None,
) -> None:
    """Run a fleet that nobody has at hand in simulated time: waiting, staleness, broadcast, cost. Starts nothing."""
    from echo_ops.cli import simulate as commands

    if paper:
        commands.simulate_paper(as_json=as_json, page=page)
    else:
        commands.simulate(file, steps=steps, seed=seed, compared=compare, as_json=as_json, page=page)


@app.command("run")
def run(
    role: Annotated[Role, typer.Argument(help="Which role this process is.")],
    config: Config = None,
    name: Annotated[str | None, typer.Option(help="Tells processes of one role apart in client ids and logs; a worker's id.")] = None,
    announce: Annotated[Path | None, typer.Option(help="Write a JSON file with pid and metrics address once they are known.")] = None,
    log_file: Annotated[Path | None, typer.Option("--log-file", help="Log there instead of to standard error.")] = None,
    log_format: Annotated[
        Literal["text", "json"] | None, typer.Option("--log-format", help="json: one object a line. By default as [logs] format says.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="worker: which [[rollout.pool]] of the file it is.")] = None,
    episodes: Annotated[Path | None, typer.Option(help="offline: the file of episodes, in place of [offline] episodes.")] = None,
    takeover: Annotated[bool, typer.Option("--takeover", help="learner: take the run over from a process that does not answer.")] = False,
    skip: Annotated[bool, typer.Option("--skip", help="learner: drop the seqs whose records the log has lost, and go on.")] = False,
    application: Annotated[
        str | None, typer.Option(help="reward: the name of an application beside the run's own; processes of one name share its work.")
    ] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option("--reward", help="reward, with --application: score with this one, not with all of the file. Repeatable."),
    ] = None,
    beginning: Annotated[str, typer.Option("--from", help="reward, with --application: where its group begins anew.")] = "",
    share: Annotated[float, typer.Option("--sample", min=0.0, max=1.0, help="reward, with --application: share of the groups.")] = 1.0,
    ends_with_run: Annotated[
        bool, typer.Option("--ends-with-run", help="reward, with --application: end two minutes after the run has.")
    ] = False,
) -> None:
    """Run one role in this process until it is done; SIGTERM drains it."""
    from echo_ops.cli import run as commands

    flags = Flags(
        kind=kind or "",
        episodes=episodes,
        takeover=takeover,
        skip=skip,
        application=application,
        names=tuple(rewards or ()),
        beginning=beginning,
        share=share,
        ends_with_run=ends_with_run,
    )
    commands.run_role(role, config, name=name, announce=announce, logs=commands.LogOptions(file=log_file, form=log_format), flags=flags)


Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of a live screen; so anyway where the output is no terminal.")]
SummaryFile = Annotated[
    Path | None, typer.Option("--summary", metavar="FILE", help="Write the run's numbers there as JSON, not into the run's folder.")
]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.html", help="Write the report there, not into the run's folder.")
]
Steps = Annotated[int | None, typer.Option(min=0, help="Training steps instead of the file's; 0: until stopped.")]


@app.command("up")
def up(
    config: Config = None,
    plain: Plain = False,
    summary: SummaryFile = None,
    report: ReportFile = None,
    steps: Steps = None,
    keep_kafka: Annotated[bool, typer.Option("--keep-kafka", help="Leave the embedded Kafka running, with the run's log in it.")] = False,
    takeover: Annotated[bool, typer.Option("--takeover", help="Take the run over from a learner that does not answer.")] = False,
    skip: Annotated[bool, typer.Option("--skip", help="Drop the seqs whose records the log has lost, and go on.")] = False,
    only_check: Annotated[bool, typer.Option("--check", help="As `echoswarm check`: start nothing.")] = False,
) -> None:
    """Run every role of the configuration on this machine, with a Kafka if none is named. Ctrl-C drains."""
    from echo_ops.cli import up as commands

    if only_check:
        check(config)
        return
    flags = tuple(flag for flag, is_given in (("--takeover", takeover), ("--skip", skip)) if is_given)
    options = commands.Options(plain=plain, summary=summary, report=report, keep_kafka=keep_kafka, learner_flags=flags)
    commands.up(config, steps=steps, options=options)


@app.command("demo")
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
    """Watch a tiny model learn: Kafka, vLLM, Faust and DeepSpeed on this machine, in about two minutes.

    One that did not finish goes on when it is started again by the same command in the same folder.
    """
    from echo_ops.cli import demo as commands
    from echo_ops.cli.up import Options

    options = Options(plain=plain, summary=summary, report=report)
    commands.demo(commands.demo_name(name, task), mode=mode, seed=seed, steps=steps, new=new, options=options)


@app.command("fork")
def fork(
    name: Annotated[str, typer.Argument(help="What the new run is called.")],
    version: Annotated[int, typer.Option("--version", min=0, help="The version of the configured run that it begins at.")],
    config: Config = None,
    sha256: Annotated[str, typer.Option(metavar="HEX", help="First digits of that version's checksum, to be sure which weights.")] = "",
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="With a fresh optimizer; so a version of which only the log has the weights will do.")
    ] = False,
    parent: Annotated[str | None, typer.Option("--from", metavar="RUN", help="Fork this run instead of the configured one.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The new run's folder of checkpoints; by default beside the old one.")] = None,
) -> None:
    """Begin a run of its own from a version of another: to go back, or to go on under another configuration."""
    from echo_ops.cli import fork as commands

    commands.fork(config, name, version, sha256=sha256, weights_only=weights_only, parent=parent, folder=folder)


@app.command("eval")
def evaluate(
    config: Config = None,
    version: Annotated[
        list[int] | None, typer.Option("--version", min=0, help="A kept version; repeatable. By default the newest.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="A section [[eval]] of the file, or the name of one made of the options.")] = None,
    prompts: Annotated[int | None, typer.Option(min=2, help="Held-out prompts, for one that the file does not have.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples of each prompt.")] = None,
    pass_at: Annotated[list[int] | None, typer.Option("--pass-at", min=1, help="k of a pass@k; repeatable.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Softmax temperature; 0: the most likely token.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds to wait for all results.")] = 3600.0,
) -> None:
    """Evaluate versions of a run on held-out prompts: by its learner while it trains, else with workers started for it."""
    from echo_ops.cli import evaluate as commands

    asked = commands.EvaluationWish(
        versions=tuple(version or ()),
        name=name,
        prompts=prompts,
        samples=samples,
        pass_at=tuple(pass_at or ()),
        temperature=temperature,
        timeout_s=timeout,
    )
    commands.evaluate(config, asked)


@app.command("audit")
def audit(
    config: Config = None,
    run: Annotated[list[str] | None, typer.Option("--run", metavar="NAME", help="A run of the namespace; repeatable.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write everything that was found there.")] = None,
    allow_unproved: Annotated[
        bool, typer.Option("--allow-unproved", help="Exit 0 also where retention has removed what a proof needs.")
    ] = False,
) -> None:
    """Prove from the log what was promised of a run, or show the counter-example: exit 0 proved, 4 broken, 5 unproved."""
    from echo_ops.cli import audit as commands

    commands.audit(config, tuple(run or ()), json_file=json_file, allow_unproved=allow_unproved)


@app.command("retrain")
def retrain(
    version: Annotated[str, typer.Option("--version", metavar="A..B", help="Published versions to train again, both included, or one.")],
    config: Config = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="From the base model, though a nearer checkpoint is kept.")] = False,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="How far off the weights may be, as a share of the way that training has moved them.")
    ] = 0.02,
    exact: Annotated[
        bool, typer.Option("--exact", help="Every byte must be the same; the machine, threads and ranks must be, too.")
    ] = False,
    ranks: Annotated[int | None, typer.Option(min=1, help="Processes that train together, if not those of the file.")] = None,
    rewards: Annotated[
        list[str] | None,
        typer.Option("--rewards", metavar="NAME=WEIGHT", help="What if it had been trained on these, and nothing else? Repeatable."),
    ] = None,
    prompts: Annotated[int, typer.Option(min=0, help="With --rewards: held-out prompts to evaluate on; 0: none.")] = 64,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result of each version there.")] = None,
) -> None:
    """Train published versions again from the log: exit 0 if the same weights come out, 4 if others. Or under other rewards: how far the
    weights and their evaluation move."""
    from echo_ops.cli import retrain as commands

    wish = commands.RetrainWish(
        versions=version,
        from_start=from_start,
        tolerance=tolerance,
        exact=exact,
        ranks=ranks,
        rewards=tuple(rewards or ()),
        prompts=prompts,
        json_file=json_file,
    )
    commands.retrain(config, wish)


def main() -> None:
    """Entry point of `echoswarm`."""
    app()
