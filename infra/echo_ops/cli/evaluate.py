"""`echoswarm eval`: evaluate versions of a run whose weights are kept, while it trains or afterwards.

A running learner is asked for it (`control`) and writes the result. Without one, this process takes the learner's transactional id until
it ends, and starts workers and rewards of its own where none run. So `evals` has one writer in both cases.

Threads: one thread reads the log for the evaluations' own thread; everything else runs in the caller's.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from echo_bus.bus import Bus
from echo_bus.clock import Deadline, SystemClock
from echo_bus.errors import DeadlineExceeded, ProducerFenced
from echo_bus.reading.reader import From
from echo_embedded.guard import Guard
from echo_learner.commit.session import is_alive, read_tip
from echo_learner.evaluation.evaluations import Evaluations
from echo_learner.evaluation.requests import Planned
from echo_learner.evaluation.setup import kept_manifests, open_evaluations, plan_section, read_evaluations
from echo_learner.metrics import LearnerMetrics
from echo_ops.cli.context import config_file, reach_cluster, read_settings
from echo_ops.cli.options import Config
from echo_ops.cli.output import out
from echo_ops.groups import has_members
from echo_ops.orders import give_order
from echo_ops.report.evaluations import evaluation_line
from echo_ops.roles import Role
from echo_ops.supervisor.child import Crew, ProcessChild
from echo_ops.supervisor.placement import this_machine
from echo_ops.supervisor.plan import plan_children
from echo_runtime.opening import open_bus
from echo_schemas.errors import UserError
from echo_schemas.records import Eval, EvaluationOrder, Purpose, Reward, Trajectory
from echo_schemas.topics import EVALS, OWN_APPLICATION, REWARDS, TRAJECTORIES
from echo_settings import Settings
from echo_settings.evaluation import EvalSettings, check_evaluations

_DEFAULT_NAME = "by-hand"
_LOOK_S = 0.5
_READ_S = 0.2
_PATIENCE_S = 20.0
# The roles that answer an evaluation, and the group of each, whose members show that one runs already.
_GROUPS = {Role.WORKER: ("worker",), Role.REWARD: ("reward", OWN_APPLICATION)}


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
    """Evaluate and print one line a version. Raises UserError for a version that is not kept, an unknown section, task or reward."""
    settings = read_settings(config)
    reach_cluster(settings, "learner")
    options = {"prompts": prompts, "samples": samples, "pass_at": pass_at or None, "temperature": temperature}
    section = choose_section(settings, name, {option: value for option, value in options.items() if value is not None})
    planned = plan_section(settings, section)
    bus = open_bus(settings, "learner.eval")
    versions = choose_versions(version or (), sorted(kept_manifests(bus, settings.run.name)), settings.run.name)
    missing = _show_recorded(bus, planned, versions)
    if not missing:
        return
    claim = read_tip(bus, settings.run.name).claim
    if claim is not None and is_alive(bus, claim):
        if claim.run_id != settings.run.name:
            raise UserError(
                f"The namespace {bus.namespace.name} belongs to the run {claim.run_id!r}, which is training.",
                hint="Wait until it has ended, or evaluate a version of that run: its workers serve no other.",
            )
        out.print(f"The learner of {settings.run.name} is asked for {_listed(missing)}.")
        _order(settings, bus, section, missing, timeout)
        return
    with _crew(settings, config_file(config), bus) as crew:
        _evaluate_here(settings, bus, planned, missing, crew, Deadline.after(timeout))


def choose_section(settings: Settings, name: str | None, given: dict[str, Any]) -> EvalSettings:
    """The file's section of that name, its only one, or one made of the options `given`. Raises UserError."""
    known = {section.name: section for section in settings.eval}
    if name in known or (name is None and len(known) == 1 and not given):
        section = known[name] if name is not None else settings.eval[0]
        if given:
            raise UserError(
                f"The file says what evaluation {section.name!r} asks; with other {', '.join(given)} its results could not be compared.",
                hint="Give this one another --name.",
            )
        return section
    if name is None and known and not given:
        raise UserError("The file has several evaluations.", hint=f"Choose one with --name: {', '.join(known)}.")
    try:
        section = EvalSettings.model_validate({"name": name or _DEFAULT_NAME, **given})
        check_evaluations(
            (*settings.eval, section),
            run_seed=settings.run.seed,
            kappa=1,
            max_length=settings.policy.max_length,
            rewards=tuple(settings.rewards),
        )
    except ValidationError as exc:
        raise UserError("; ".join(str(error["msg"]).removeprefix("Value error, ") for error in exc.errors()) + ".") from None
    except ValueError as exc:
        raise UserError(f"{exc}.") from None
    return section


def choose_versions(wanted: Sequence[int], kept: Sequence[int], run_id: str) -> list[int]:
    """`wanted` in order, each once; the newest if it is empty. Raises UserError, which names the kept versions."""
    if not kept:
        raise UserError(
            f"No weights of run {run_id!r} are kept in the log.", hint="Is [run] name right? A run publishes version 0 when it begins."
        )
    for version in wanted:
        if version not in kept:
            raise UserError(f"Version {version} of run {run_id!r} is not kept.", hint=f"Kept: {_ranges(kept)}.")
    return sorted(set(wanted)) or [kept[-1]]


def _ranges(versions: Sequence[int]) -> str:
    """`0 to 4, 8, 10 to 12`."""
    found: list[list[int]] = []
    for version in versions:
        if found and found[-1][-1] == version - 1:
            found[-1][1:] = [version]
        else:
            found.append([version])
    return ", ".join(" to ".join(map(str, each)) for each in found)


def _listed(versions: Sequence[int]) -> str:
    return f"version{'s' if len(versions) > 1 else ''} {', '.join(map(str, versions))}"


def _show_recorded(bus: Bus, planned: Planned, versions: Sequence[int]) -> list[int]:
    """Print the results in `evals`; returns the versions without one."""
    recorded = {result.version: result for result in read_evaluations(bus) if result.name == planned.spec.name}
    for version in versions:
        if version in recorded:
            out.print(f"{evaluation_line(recorded[version])}  recorded earlier", markup=False)
    return [version for version in versions if version not in recorded]


def _order(settings: Settings, bus: Bus, section: EvalSettings, versions: Sequence[int], timeout_s: float) -> None:
    """Ask the learner, and wait for its results. Raises DeadlineExceeded."""
    missing, deadline = set(versions), Deadline.after(timeout_s)
    with closing(bus.reader([EVALS])) as reader:
        reader.start()
        operator = open_bus(settings, "operator")
        for version in versions:
            order = EvaluationOrder(version=version, name=section.name, section=section.model_dump_json())
            give_order(operator, settings.run.name, None, evaluation=order)
        while missing:
            if deadline.expired():
                raise DeadlineExceeded(
                    f"The learner has not recorded {_listed(sorted(missing))} within {timeout_s:g} s.",
                    hint="It stays ordered; the learner's log says how far it is. Repeat the command to see the result.",
                )
            for message in reader.read(timeout_s=_LOOK_S):
                result = message.record
                if isinstance(result, Eval) and result.name == section.name and result.version in missing:
                    missing.discard(result.version)
                    out.print(evaluation_line(result), markup=False)


@contextmanager
def _crew(settings: Settings, config: Path | None, bus: Bus) -> Iterator[Crew]:
    """Workers and rewards while the block runs, for each of these roles whose group has no members."""
    wanted = [role for role, group in _GROUPS.items() if not has_members(bus.cluster, bus.namespace.group(*group))]
    folder = Path(settings.checkpoint.folder) / "evaluation"
    overrides = {"ECHO_KAFKA__BOOTSTRAP": str(bus.cluster.bootstrap)}  # type: ignore[attr-defined]  # a real cluster's
    plans = [
        plan for plan in plan_children(settings, this_machine(), config=config, overrides=overrides, folder=folder) if plan.role in wanted
    ]
    with closing(Guard()) as guard:
        crew = Crew(lambda plan: ProcessChild(plan, guard), SystemClock())
        try:
            if plans:
                out.print(f"Starting {', '.join(plan.name for plan in plans)}; their logs: {folder / 'logs'}")
            crew.start(plans)
            yield crew
            crew.drain(patience_s=_PATIENCE_S, tick=lambda: time.sleep(_READ_S))
        finally:
            crew.kill()


def _evaluate_here(settings: Settings, bus: Bus, planned: Planned, versions: Sequence[int], crew: Crew, deadline: Deadline) -> None:
    """Evaluate in this process, in the place of a learner. Raises UserError, DeadlineExceeded."""
    with ExitStack() as stack:
        writer = stack.enter_context(closing(bus.transactions("learner")))
        # From here on no other process can write results. The evaluations read back what a learner wrote just before.
        writer.start()
        evaluations = open_evaluations(settings, bus, LearnerMetrics(), SystemClock())
        stack.enter_context(closing(evaluations))
        stack.enter_context(_followed(bus, evaluations))
        evaluations.start()
        for version in versions:
            evaluations.order(planned, version)
        missing, is_done = set(versions), False
        while not is_done:
            if any(child.poll() is not None for child in crew.children):
                raise UserError("A worker or reward process has ended.", hint="Its log says why; see the folder named above.")
            if deadline.expired():
                raise DeadlineExceeded(f"{_listed(sorted(missing))} took too long.", hint="Allow more with --timeout; see the logs.")
            is_done = evaluations.wait(_LOOK_S)
            results = evaluations.take()
            try:
                if results:
                    with writer.transaction() as transaction:
                        for result in results:
                            transaction.publish(EVALS, result)
            except ProducerFenced as exc:
                raise UserError(
                    "A learner of this namespace has started and taken over, so the result is not recorded.",
                    hint="Repeat the command: it will ask that learner.",
                ) from exc
            for result in results:
                missing.discard(result.version)
                out.print(evaluation_line(result), markup=False)
    if missing:
        raise UserError(
            f"No worker answered for {_listed(sorted(missing))}.", hint="The workers' logs say why: the weights may be gone by now."
        )


@contextmanager
def _followed(bus: Bus, evaluations: Evaluations) -> Iterator[None]:
    """A thread that gives `evaluations` every record that is written from now on."""
    reader = bus.reader([TRAJECTORIES, REWARDS])
    reader.start(otherwise=From.END)
    stop = threading.Event()

    def follow() -> None:
        while not stop.is_set():
            for message in reader.read(timeout_s=_READ_S):
                record = message.record
                if isinstance(record, Trajectory) and record.purpose is Purpose.EVAL:
                    evaluations.add_trajectory(message.coordinates, record)
                elif isinstance(record, Reward) and evaluations.is_judging(record):
                    evaluations.add_reward(message.coordinates, record)

    thread = threading.Thread(target=follow, name="answers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        reader.close()
