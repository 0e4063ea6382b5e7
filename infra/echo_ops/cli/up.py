"""`echoswarm up`: a whole run from one command. `echoswarm demo` runs the same way."""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from echo_bus.bus import Bus
from echo_bus.clock import SystemClock
from echo_bus.errors import TransportError
from echo_embedded.guard import Guard
from echo_learner.commit.run_record import software
from echo_ops.access import admit_if_secured
from echo_ops.cli.check import check
from echo_ops.cli.context import config_file
from echo_ops.cli.options import Config
from echo_ops.cli.output import out
from echo_ops.preflight import refuse_unsound
from echo_ops.report.charts import close_up_window
from echo_ops.report.observer import Observer
from echo_ops.report.page import report_page
from echo_ops.report.plain import PlainLines, closing_lines
from echo_ops.report.run_view import Milestone, RunView
from echo_ops.report.screen import Screen
from echo_ops.report.spans import GenerationSpan, read_spans
from echo_ops.report.standstill import Standstills
from echo_ops.report.summary import summarise_run
from echo_ops.supervisor.broker import RunBroker, given_bootstrap
from echo_ops.supervisor.child import Crew, ProcessChild
from echo_ops.supervisor.placement import this_machine
from echo_ops.supervisor.plan import plan_children
from echo_ops.supervisor.registration import folder_lock, make_topics, refuse_if_owned
from echo_ops.supervisor.supervisor import RunEnd, Supervisor
from echo_ops.surroundings import process_age_s
from echo_runtime.logins import ADMIN
from echo_runtime.logs import set_up_logs
from echo_runtime.opening import open_bus, open_cluster
from echo_runtime.ownership import START_VARIABLE
from echo_schemas.errors import EchoError
from echo_schemas.records import RunState, ordered_state
from echo_settings import Settings, load_settings
from echo_settings.kinds import kinds_of
from echo_settings.public import public_config

logger = logging.getLogger(__name__)

Plain = Annotated[bool, typer.Option("--plain", help="Lines instead of a live screen; always so if the output is no terminal.")]
SummaryFile = Annotated[
    Path | None,
    typer.Option("--summary", metavar="FILE", dir_okay=False, help="Write the run's numbers there as JSON, not into the run's folder."),
]
ReportFile = Annotated[
    Path | None, typer.Option("--report", metavar="FILE.html", dir_okay=False, help="Write the report there, not into the run's folder.")
]
Steps = Annotated[int | None, typer.Option(min=0, help="Training steps instead of the file's; 0: until stopped.")]


SUPERVISOR_LOG = "supervisor.log"
"""In the run's folder as soon as a run begins there."""


class Disagreement(EchoError):
    """Learner and workers do not compute the same log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to run. `agreement` is the largest log-probability difference between learner and workers with which the command succeeds;
    `learner_flags` go to the learner. A Kafka that the run starts keeps its data in `kafka_folder`.
    """

    plain: bool
    summary: Path | None = None
    report: Path | None = None
    steps: int | None = None
    keep_kafka: bool = False
    kafka_folder: Path | None = None
    agreement: float | None = None
    learner_flags: tuple[str, ...] = ()


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
    """Run the file's roles; report and summary lie in the checkpoint folder by default. Exits 1 if a role died, 130 if interrupted."""
    if only_check:
        check(config)
        return
    flags = tuple(flag for flag, is_given in (("--takeover", takeover), ("--skip", skip)) if is_given)
    options = Options(plain=plain, summary=summary, report=report, steps=steps, keep_kafka=keep_kafka, learner_flags=flags)
    execute(config_file(config), options)


def execute(config: Path | None, options: Options) -> None:
    """Supervise the run of `config`; exits as `up`. Raises UserError, with nothing changed, if a run is going on in its folder or
    namespace; Disagreement if learner and workers differ by more than `options.agreement`.
    """
    overrides = {} if options.steps is None else {"ECHO_LEARNER__STEPS": str(options.steps)}
    settings = load_settings(config, {**os.environ, **overrides})
    admit_if_secured(settings)
    refuse_unsound(settings)
    with folder_lock(Path(settings.checkpoint.folder)):
        # A Kafka that is started for this run has no other owner.
        if given_bootstrap(settings.kafka.bootstrap) is not None:
            takeover = "--takeover" in options.learner_flags
            refuse_if_owned(open_cluster(settings), open_bus(settings, "view"), settings.run.name, takeover=takeover)
        _Run(config, options, settings, overrides).execute()


class _Run:
    """One supervised run, from settings to summary."""

    def __init__(self, config: Path | None, options: Options, settings: Settings, overrides: Mapping[str, str]) -> None:
        self._options = options
        self._clock = SystemClock()
        self._zero_s = self._clock.monotonic_s() - process_age_s()
        self._settings = settings
        self._folder = Path(self._settings.checkpoint.folder)
        self._report = options.report or self._folder / "report.html"
        self._summary = options.summary or self._folder / "summary.json"
        self._machine = this_machine()
        self._broker = RunBroker(
            self._settings,
            num_cores=len(self._machine.cores),
            keep=options.keep_kafka,
            folder=options.kafka_folder,
            report=lambda line: self.say(line),
        )
        overrides = {**overrides, "ECHO_KAFKA__BOOTSTRAP": self._broker.bootstrap, START_VARIABLE: secrets.token_hex(2)}
        self._connected = load_settings(config, {**os.environ, **overrides})
        self._plans = plan_children(
            self._settings,
            self._machine,
            config=config,
            overrides=overrides,
            folder=self._folder,
            learner_flags=options.learner_flags,
        )
        shutil.rmtree(self._folder / "processes", ignore_errors=True)
        started_ms = self._clock.time_ms() - round(self._elapsed_s() * 1000)
        view = RunView(
            self._settings.run.name,
            started_ms=started_ms,
            steps_wanted=self._settings.learner.steps,
            budget=self._settings.budget,
        )
        self._observer = Observer(view, {plan.name: plan.announce for plan in self._plans}, self._elapsed_s)
        self._lines = PlainLines()
        self._standstills = Standstills()
        self._screen: Screen | None = None
        self._bus: Bus | None = None
        self._spans: list[GenerationSpan] = []
        self._difference: float | None = None
        self._has_told_rewards = False
        self._is_stopped = False

    def execute(self) -> None:
        """Run it, print and write the results, exit with its code."""
        set_up_logs(self._folder / SUPERVISOR_LOG, self._settings.logs.format, run=self._settings.run.name, role="up", process="up")
        outcome: str = "died"
        try:
            with ExitStack() as stack:
                if not self._options.plain and out.is_terminal:
                    self._screen = stack.enter_context(Screen(out, self._elapsed_s, str(self._folder / "logs")))
                    stack.callback(self._leave_screen)
                guard = stack.enter_context(closing(Guard()))
                crew = Crew(lambda plan: ProcessChild(plan, guard), self._clock)
                drain_s = max(self._settings.run.drain_s, *(kind.run.drain_s for _, kind in kinds_of(self._settings)))
                released = self._released if self._settings.coordinator.machines == "local" else frozenset
                outcome = Supervisor(crew, self._broker, self, self._clock, drain_s=drain_s, released=released).run(self._plans).value
        finally:
            self._close(outcome)
        if outcome == RunEnd.INTERRUPTED:
            sys.exit(130)
        limit = self._options.agreement
        if limit is not None and self._difference is not None and self._difference > limit:
            raise Disagreement(
                f"Learner and worker differ by {self._difference:.1e} in the log-probability of the same token under the same weights, "
                f"more than {limit:.0e}: what is trained is not what was sampled.",
                hint="Follow the metric probe_logprob_diff_max over the steps: high from the first step on, the model codes differ; high "
                "only later, an install of weights went wrong.",
            )

    def tick(self) -> None:
        """Show new events. The supervisor calls it ten times a second."""
        self._observer.look_for_announcements()
        if not self._has_told_rewards:
            with self._observer.view() as view:
                others, self._has_told_rewards = view.other_rewards(self._settings.rewards), view.weights is not None
            if others:
                self.say(others)
        with self._observer.view() as view:
            still = list(self._standstills.news(view, self._elapsed_s()))
        for line in still:
            self.say(line)
        if self._screen is not None:
            if self._screen.is_due:
                with self._observer.view() as view:
                    self._screen.draw(view)
            return
        with self._observer.view() as view:
            lines = list(self._lines.news(view))
        for line in lines:
            self.say(line)

    def say(self, line: str) -> None:
        """Show one line, on the screen or below the last line."""
        logger.info("%s", line)
        if self._screen is not None:
            self._screen.say(line)
        else:
            out.print(escape(line))

    def _released(self) -> frozenset[str]:
        with self._observer.view() as view:
            return frozenset(view.released)

    def _leave_screen(self) -> None:
        self._screen = None

    def _elapsed_s(self) -> float:
        return self._clock.monotonic_s() - self._zero_s

    def prepare(self) -> None:
        self._observer.note(Milestone.KAFKA)
        self._bus = bus = open_bus(self._connected, "view")
        differing = make_topics(open_cluster(self._connected, ADMIN), bus.namespace, replicas=self._settings.kafka.replicas)
        if differing:
            self.say(differing)
        self._observer.note(Milestone.TOPICS)
        self._observer.start(bus)

    def conclude(self) -> None:
        """Read everything that needs Kafka, before it stops."""
        self._observer.finish()
        if self._bus is None:
            return
        with self._observer.view() as view:
            if not view.steps:
                return
            start_s, end_s = close_up_window(view)
            zero_ms = view.started_ms
        try:
            self._spans = read_spans(self._bus, zero_ms + round(start_s * 1000), zero_ms + round(end_s * 1000))
            with closing(self._bus.orders()) as orders:
                self._is_stopped = ordered_state(orders.get(f"{self._settings.run.name}/run")) is RunState.STOPPING
        except TransportError as exc:
            logger.warning("The report has no close-up, or an order to stop is not seen: %s", exc)

    def _close(self, outcome: str) -> None:
        """Print the last lines and write the files. A refused start, and a start of a finished run, keep the files from before."""
        if self._options.plain or not out.is_terminal:
            self.tick()
        with self._observer.view() as view:
            if outcome == RunEnd.FINISHED and not 0 < view.steps_wanted <= view.num_steps:
                outcome = RunEnd.STOPPED
            if outcome == RunEnd.FINISHED and not view.steps and has_finished(self._summary):
                self.say(
                    f"All {view.steps_wanted} steps were trained before; report and summary stay. More [learner] steps extend the run."
                )
                return
            summary = summarise_run(view, wall_s=self._elapsed_s(), outcome=outcome, software=software())
            name = "exact match" if view.is_exact else "reward"
            config = public_config(self._settings)
            if view.weights is not None:
                config["rewards"] = view.weights
            was_accepted = bool(view.steps) or Milestone.LEARNER_READY in view.milestones
            page = report_page(view, summary, config, self._spans, view.started_ms)
        if summary["steps"]:
            for line in closing_lines(summary, name):
                self.say(line)
        if was_accepted or self._options.summary is not None:
            _write(self._summary, json.dumps(summary, indent=2) + "\n")
        if was_accepted or self._options.report is not None:
            _write(self._report, page)
            self.say(f"report: {self._report.absolute()}")
        if self._is_stopped:
            name = self._settings.run.name
            self.say(f"{name} was told to stop: `echoswarm runs resume {name}` lets it start again.")
        self._difference = summary["logprob_max_diff"]


def has_finished(summary: Path) -> bool:
    """Whether a run's summary is there and says that the run has finished."""
    try:
        return bool(json.loads(summary.read_text(encoding="utf-8"))["outcome"] == RunEnd.FINISHED)
    except (OSError, ValueError, KeyError):
        return False


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")
