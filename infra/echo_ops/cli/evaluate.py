"""`echoswarm eval`: evaluate versions of a run whose weights are kept, while it trains or afterwards.

A learner that lives is asked for it (`control`) and writes the result. Where none does, this process holds the learner's transactional id
for as long, with workers and rewards of its own unless there are some. Either way there is one writer of `evals`.

Threads: one thread follows the log for the evaluations' own thread; everything else is the caller's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

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
from echo_ops.cli.context import DEFAULT_CONFIG, reach_cluster, read_settings
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
from echo_schemas.topics import EVALS, REWARDS, TRAJECTORIES
from echo_settings import Settings
from echo_settings.evaluation import EvalSettings, check_evaluations

_DEFAULT_NAME = "by-hand"
_LOOK_S = 0.5
_READ_S = 0.2
_GROUPS_S = 10.0
_PATIENCE_S = 20.0
# Which children answer an evaluation, and the group that tells whether somebody does already.
_GROUPS = {Role.WORKER: ("worker",), Role.REWARD: ("reward", "main")}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationWish:
    """What the command line says. `versions` empty: the newest. The numbers describe an evaluation that the file does not have."""

    versions: tuple[int, ...]
    name: str | None = None
    prompts: int | None = None
    samples: int | None = None
    pass_at: tuple[int, ...] = ()
    temperature: float | None = None
    timeout_s: float = 3600.0


def evaluate(config: Path | None, asked: EvaluationWish) -> None:
    """Evaluate and print one line a version. Raises UserError for a version that is not kept, an unknown section, task or reward."""
    settings = read_settings(config)
    reach_cluster(settings, "learner")
    section = choose_section(settings, asked)
    planned = plan_section(settings, section)
    bus = open_bus(settings, "learner.eval")
    versions = choose_versions(asked.versions, sorted(kept_manifests(bus, settings.run.name)), settings.run.name)
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
        _order(settings, bus, section, missing, asked.timeout_s)
        return
    with _crew(settings, config or (DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None), bus) as check:
        _evaluate_here(settings, bus, planned, missing, check, Deadline.after(asked.timeout_s))


def choose_section(settings: Settings, asked: EvaluationWish) -> EvalSettings:
    """The file's section of that name, its only one, or one made of the options. Raises UserError."""
    given = {
        name: value
        for name, value in (
            ("prompts", asked.prompts),
            ("samples", asked.samples),
            ("pass_at", asked.pass_at or None),
            ("temperature", asked.temperature),
        )
        if value is not None
    }
    known = {section.name: section for section in settings.eval}
    if asked.name in known or (asked.name is None and len(known) == 1 and not given):
        section = known[asked.name] if asked.name is not None else settings.eval[0]
        if given:
            raise UserError(
                f"The file says what evaluation {section.name!r} asks; with other {', '.join(given)} its results could not be compared.",
                hint="Give this one another --name.",
            )
        return section
    if asked.name is None and known and not given:
        raise UserError("The file has several evaluations.", hint=f"Choose one with --name: {', '.join(known)}.")
    try:
        section = EvalSettings.model_validate({"name": asked.name or _DEFAULT_NAME, **given})
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
    """`wanted` in order, each once; the newest if none is. Raises UserError, saying what is kept."""
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
    """Print what `evals` has; the versions that it lacks."""
    recorded = {result.version: result for result in read_evaluations(bus) if result.name == planned.spec.name}
    for version in versions:
        if version in recorded:
            out.print(f"{evaluation_line(recorded[version])}  recorded earlier", markup=False)
    return [version for version in versions if version not in recorded]


def _order(settings: Settings, bus: Bus, section: EvalSettings, versions: Sequence[int], timeout_s: float) -> None:
    """Ask the learner, and wait for its results."""
    missing, deadline = set(versions), Deadline.after(timeout_s)
    with ExitStack() as stack:
        reader = stack.enter_context(closing(bus.reader([EVALS])))
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
def _crew(settings: Settings, config: Path | None, bus: Bus) -> Iterator[threading.Event]:
    """Workers and rewards for as long as the block lasts, of those roles that have nobody. The event is set when one has died."""
    wanted = [role for role, group in _GROUPS.items() if not has_members(bus.cluster, bus.namespace.group(*group))]
    folder = Path(settings.checkpoint.folder) / "evaluation"
    overrides = {"ECHO_KAFKA__BOOTSTRAP": str(bus.cluster.bootstrap)}  # type: ignore[attr-defined]  # a real cluster's
    plans = [
        plan for plan in plan_children(settings, this_machine(), config=config, overrides=overrides, folder=folder) if plan.role in wanted
    ]
    died = threading.Event()
    with closing(Guard()) as guard:
        crew = Crew(lambda plan: ProcessChild(plan, guard), SystemClock())
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(_LOOK_S):
                if any(child.poll() is not None for child in crew.children):
                    died.set()
                    return

        nap = threading.Event()

        def tick() -> None:
            nap.wait(_READ_S)

        watching = threading.Thread(target=watch, name="children", daemon=True)
        try:
            if plans:
                out.print(f"Starting {', '.join(plan.name for plan in plans)}; their logs: {folder / 'logs'}")
            crew.start(plans)
            watching.start()
            yield died
            stop.set()
            watching.join()
            crew.drain(patience_s=_PATIENCE_S, tick=tick)
        finally:
            stop.set()
            crew.kill()


def _evaluate_here(
    settings: Settings, bus: Bus, planned: Planned, versions: Sequence[int], died: threading.Event, deadline: Deadline
) -> None:
    """As the learner would, without one."""
    with ExitStack() as stack:
        writer = stack.enter_context(closing(bus.transactions("learner")))
        # From here on nobody else writes results; what a learner wrote just before is read back by the evaluations.
        writer.start()
        evaluations = open_evaluations(settings, bus, LearnerMetrics(), SystemClock())
        stack.enter_context(closing(evaluations))
        stack.enter_context(_followed(bus, evaluations))
        evaluations.start()
        for version in versions:
            evaluations.order(planned, version)
        missing, is_done = set(versions), False
        while not is_done:
            if died.is_set():
                raise UserError("A worker or reward process has ended.", hint="Its log says why; see the folder named above.")
            if deadline.expired():
                raise DeadlineExceeded(f"{_listed(sorted(missing))} took too long.", hint="Allow more with --timeout; see the logs.")
            is_done = evaluations.wait(_LOOK_S)
            results = evaluations.take()
            try:
                if results:
                    with writer.transaction():
                        for result in results:
                            writer.publish(EVALS, result)
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
            f"Nobody answered for {_listed(sorted(missing))}.", hint="The workers' logs say why: their weights may be gone by now."
        )


@contextmanager
def _followed(bus: Bus, evaluations: Evaluations) -> Iterator[None]:
    """A thread that gives `evaluations` what is written from now on."""
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
