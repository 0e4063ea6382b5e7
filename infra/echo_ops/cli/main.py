"""The command line: which commands there are, and what `--help` says of each.

A command is a function with its options in the module that is named here. The module is imported when the command runs, so that `--help`
stays quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from echo_ops.cli.output import out, user_errors
from echo_runtime.garbage import without_collection

_GROUPS = {
    "reward": "Rewards of a running run: write, try, attach, weigh, detach.",
    "checkpoints": "The checkpoints of a run: list them, remove those that the run does not need any more.",
    "kafka": "A real Apache Kafka on this machine, from Python packages alone.",
    "topics": "Topics as code: compare the cluster with the topic files, and change the cluster to match them.",
    "schemas": "Avro schemas: compatibility, ids, registration.",
    "acls": "Access lists, generated from topic files and roles.",
    "dlq": "Dead letters: messages that no reader could use. List them, redrive each exactly once, or discard them.",
    "runs": "The runs of the namespace: list, pause, stop, archive, remove.",
    "keys": "Keys that sign trajectories and rewards.",
    "monitoring": "Alerts and dashboards for Prometheus and Grafana.",
}

# Command → module of echo_ops.cli and function in it, and the text of `--help`.
_COMMANDS = {
    "demo": (
        "demo:demo",
        "Watch a tiny model learn: Kafka, vLLM, Faust and DeepSpeed on this machine, in two minutes. An unfinished one is continued.",
    ),
    "up": ("up:up", "Run every role of the configuration on this machine, with a Kafka if the file names none. Ctrl-C drains."),
    "run": ("run:run_role", "Run one role in this process until it is done; SIGTERM drains it."),
    "check": (
        "check:check",
        "Say what a run's file needs (memory, time, bytes, what to rent) and everything in it that will not work, before anything starts.",
    ),
    "doctor": (
        "doctor:doctor",
        "Check what is installed, reachable, too small or drifted, and say how to mend it; exit 1 if something is broken.",
    ),
    "plan": (
        "plan:plan",
        "Say how many workers a run needs, which ones, what a step and an accuracy cost; exit 1 if no plan works. Starts nothing.",
    ),
    "simulate": (
        "simulate:simulate",
        "Run a made-up fleet of workers in simulated time: waiting, staleness, broadcast, cost. Starts nothing.",
    ),
    "settings": ("settings:settings", "Print every setting with type, default and meaning, as the Markdown of docs/settings.md."),
    "tail": ("tail:tail", "Print decoded records with their keys and headers."),
    "show": ("show:show", "Show a group, a record or a step: text by token, versions, turns, rewards by name, and what became of it."),
    "search": ("search:search", "Find trajectories by their text or their tokens, in one range of the past or in all of it."),
    "lineage": (
        "lineage:lineage",
        "Say what made the weights of a version (groups, workers, rewards, checkpoint), and what became of its samples.",
    ),
    "sql": ("sql:sql", "Ask a run's past in SQL: an export (--from), or one range of the log."),
    "view": (
        "view:view",
        "Look at a run in a browser: from a curve to the token, a timeline, SQL. Reads the log, live, or an export; only for this machine.",
    ),
    "export": (
        "export:export",
        "Write a run as Parquet files, or add to them what is new: each record once, even if an earlier export was killed.",
    ),
    "replay": ("replay:replay", "Write trajectories of the past again, byte for byte, each with the place it comes from."),
    "rescore": (
        "rescore:rescore",
        "Score a range of the past with another reward, or another version of one, and compare. After a kill, the same command continues.",
    ),
    "audit": (
        "audit:audit",
        "Prove from the log every promise made about a run, or show the counter-example: exit 0 proved, 4 broken, 5 unproved.",
    ),
    "retrain": (
        "retrain:retrain",
        "Train published versions again from the log: exit 0 if the same weights come out, 4 if others. Or train under other rewards.",
    ),
    "eval": (
        "evaluate:evaluate",
        "Evaluate versions of a run on held-out prompts: by its learner while it trains, else with workers started for it.",
    ),
    "fork": ("fork:fork", "Begin a new run from a version of another: to go back, or to train on under another configuration."),
    "reward new": ("reward:new", "Write a reward function and a test of it, to begin with."),
    "reward test": (
        "reward:try_out",
        "Call a reward on the run's newest trajectories and show its values; writes nothing. Exit 2 if a sample got no value.",
    ),
    "reward attach": (
        "attach:attach",
        "Score the run with a reward from now on, in a process of its own beside the run; it is not trained on before it has a weight.",
    ),
    "reward weight": (
        "reward:weigh",
        "Change the weight of a reward from a version on, without a restart; the other weights stay as they are.",
    ),
    "reward list": (
        "reward:list_rewards",
        "Print for each reward of the run its application, how far behind it is, its values, and what groups do while it is missing.",
    ),
    "reward compare": (
        "compare:compare",
        "Say how far two rewards agree on the same samples, and what training on the one in place of the other would change.",
    ),
    "reward detach": ("reward:detach", "End the application of an attached reward, wherever it runs. Its records stay in the log."),
    "checkpoints list": (
        "checkpoints:list_checkpoints",
        "Print every checkpoint in the run's folder with its size and its relation to the run in the log.",
    ),
    "checkpoints prune": (
        "checkpoints:prune",
        "Remove checkpoints of the run that came to nothing or are older than the newest few. Safe beside a running learner.",
    ),
    "runs list": ("runs:list_runs", "List the runs of the namespace with the state of each."),
    "runs show": ("runs:show", "Show the settings and the state of a run."),
    "runs pause": ("runs:pause", "Pause a run: no request is written and no step is trained; its processes wait."),
    "runs resume": ("runs:resume", "Let a paused or stopped run go on."),
    "runs stop": ("runs:stop", "Let a run end after its step, with everything saved."),
    "runs archive": ("runs:archive", "Keep a run that has ended in a folder, whole and verified, so that it may be deleted."),
    "runs restore": ("runs:restore", "Bring an archived run back into empty topics of its namespace, every record at its old offset."),
    "runs delete": ("runs:delete", "Remove a run: topics, groups, access lists, checkpoints. Without --yes only list them."),
    "kafka up": ("kafka:up", "Start it in the background and wait until it answers."),
    "kafka down": ("kafka:down", "Stop it. Its data stays, unless --delete-data is given."),
    "kafka status": ("kafka:status", "Say what runs, where, and whether it answers; exit 1 if it does not."),
    "topics plan": ("topics:plan", "Show what `apply` would do. Changes nothing."),
    "topics apply": (
        "topics:apply",
        "Create and change topics until they are as the files say. Never shrinks any; lowers durability only with --force and --reason.",
    ),
    "topics check": ("topics:check", "Exit 0 if the cluster is as the files say, 3 if it has drifted. For CI."),
    "topics render": ("topics:render", "Print the topics for another tool. Changes nothing."),
    "schemas check": ("schemas:check", "Check every version of every record against every earlier one, both ways; and the lock file."),
    "schemas register": ("schemas:register", "Register all schemas with the registry of [registry] url. Idempotent."),
    "acls render": ("acls:render", "Print the smallest set of rights that each role needs. Changes nothing."),
    "dlq list": ("dlq:list_letters", "Count the dead letters by topic and reason, and how many of them wait."),
    "dlq show": ("dlq:show", "Print letters whole: what was wrong, the place of the message, its writer and its reader."),
    "dlq redrive": (
        "dlq:redrive",
        "Write letters to their topic again, each once, oldest first. Without --yes only say what would be done.",
    ),
    "dlq discard": (
        "dlq:discard_letters",
        "End the waiting of letters, oldest first; they stay readable until their retention is over. Without --yes only count them.",
    ),
    "keys new": ("keys:new", "Make a key in the folder [trust] keys, and add its public half to the file [trust] signers."),
    "keys show": ("keys:show", "List the trusted keys: id, role, names, validity, and which of them this machine has."),
    "monitoring render": ("monitoring:render_files", "Write alert rules, a scrape configuration and dashboards."),
}


class _LaterCommand(TyperCommand):
    """A command whose module is imported when it runs."""

    def __init__(self, name: str, function: str, help_text: str) -> None:
        super().__init__(name, help=help_text)
        self._function = function

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of the real command, which has the options. A group runs the command of the context."""
        module, _, name = self._function.partition(":")
        with without_collection():
            function = getattr(import_module(f"echo_ops.cli.{module}"), name)
        alone = typer.Typer(rich_markup_mode="markdown", add_completion=False)
        alone.command(self.name, help=self.help)(function)
        return typer.main.get_command(alone).make_context(info_name, args, parent, **extra)


class _Commands(TyperGroup):
    """All commands. An error of the project ends each of them with one sentence."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        groups: dict[str, TyperGroup] = {"": self}
        for words, (function, help_text) in _COMMANDS.items():
            group, _, name = words.rpartition(" ")
            if group not in groups:
                groups[group] = TyperGroup(name=group, help=_GROUPS[group], no_args_is_help=True, rich_markup_mode="markdown")
                self.add_command(groups[group])
            groups[group].add_command(_LaterCommand(name, function, help_text))

    def invoke(self, ctx: Any) -> Any:
        with user_errors():
            return super().invoke(ctx)


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib import metadata

        out.print(f"echoswarm {metadata.version('echoswarm')}")
        raise typer.Exit


@app.callback()
def _root(
    _: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the release, and exit.")] = False,
) -> None:
    """EchoSwarm: reinforcement-learning post-training of language models as a streaming pipeline on Apache Kafka."""


def main() -> None:
    """Entry point of `echoswarm`."""
    app()
