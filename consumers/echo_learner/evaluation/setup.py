"""Sets up the evaluations of one run: plans, clients, results in the log, and versions whose weights are still there.

Used by the learner's process, and by `echoswarm evaluate`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import closing

from pydantic import ValidationError

from echo_bus.bus import Bus
from echo_bus.client import profiles
from echo_bus.clock import Clock, Deadline
from echo_learner.commit.session import READ_S
from echo_learner.commit.store import still_stored
from echo_learner.evaluation.evaluations import Evaluations
from echo_learner.evaluation.requests import EvaluationRequests, Planned
from echo_learner.metrics import LearnerMetrics
from echo_schemas.errors import UserError
from echo_schemas.records import Control, Eval, EvaluationOrder, WeightManifest
from echo_schemas.topics import EVALS, WEIGHT_CHUNKS, WEIGHTS, weights_key
from echo_settings import Settings
from echo_settings.evaluation import EvalSettings
from echo_settings.rules import evaluation_spec, evaluation_specs
from echo_tasks.base_models import resolve_base
from echo_tasks.catalogue import BUILT_IN_REWARDS, BUILT_IN_TASKS, load_evaluation_tasks
from echo_tasks.prompts import PromptCodec

logger = logging.getLogger(__name__)


def plan_evaluations(settings: Settings) -> tuple[Planned, ...]:
    """The file's evaluations with their tasks. Raises UserError for an unknown task or reward."""
    specs = evaluation_specs(settings)
    tasks = load_evaluation_tasks(specs)
    return tuple(Planned(spec=spec, task=tasks[spec.name]) for spec in specs)


def plan_section(settings: Settings, section: EvalSettings) -> Planned:
    """One evaluation that the file need not have. Raises UserError as `plan_evaluations`."""
    spec = evaluation_spec(settings, section)
    return Planned(spec=spec, task=load_evaluation_tasks((spec,))[spec.name])


def plan_order(settings: Settings, order: EvaluationOrder) -> Planned:
    """The evaluation that an order asks for. An order cannot make this process import code or open a file: its task with its options, and
    its rewards, must be the configuration's, or built in and without options.

    Raises UserError, also as `plan_evaluations`; ValidationError.
    """
    section = EvalSettings.model_validate_json(order.section)
    spec, known = evaluation_spec(settings, section), evaluation_specs(settings)
    tasks = [(settings.task.name, settings.task.options), *((each.task, each.options) for each in known)]
    if (spec.task, spec.options) not in tasks and (spec.task not in BUILT_IN_TASKS or spec.options):
        raise UserError(f"the configuration has no task {spec.task!r} with these options, and an order may not bring its own")
    rewards = {*settings.rewards, *(name for each in known for name in each.rewards), *BUILT_IN_REWARDS}
    unknown = [name for name in spec.rewards if name not in rewards]
    if unknown:
        raise UserError(f"the configuration has no reward {unknown[0]!r}, and an order may not bring its own")
    return plan_section(settings, section)


def open_evaluations(settings: Settings, bus: Bus, metrics: LearnerMetrics, clock: Clock) -> Evaluations:
    """The run's evaluations, not started. Clients are opened before the first evaluation. Raises UserError as `plan_evaluations`."""

    def open_requests() -> EvaluationRequests:
        prompts = PromptCodec(resolve_base(settings.policy.base))
        return EvaluationRequests(settings.run.name, bus.publisher(profiles.PRODUCER_LATENCY), bus.observer(), prompts, clock)

    return Evaluations(
        settings.run.name,
        plan_evaluations(settings),
        open_requests=open_requests,
        recorded=lambda: {(result.version, result.name) for result in read_evaluations(bus)},
        window=settings.rollout.groups_in_flight * max(1, settings.rollout.workers),
        metrics=metrics,
        clock=clock,
    )


def read_evaluations(bus: Bus) -> list[Eval]:
    """All committed results of the run, in log order. Raises DeadlineExceeded, TransportError."""
    with closing(bus.look([EVALS])) as reader:
        reader.start()
        return [
            message.record
            for messages in reader.read_to_end(Deadline.after(READ_S, bus.clock))
            for message in messages
            if isinstance(message.record, Eval)
        ]


def kept_manifests(bus: Bus, run_id: str) -> dict[int, WeightManifest]:
    """The versions whose weights are still in the log or the store, oldest first.

    Raises DeadlineExceeded, TransportError.
    """
    published = published_manifests(bus, run_id)
    with closing(bus.look([WEIGHT_CHUNKS])) as reader:
        lows = {partition: low for (_, partition), (low, _) in reader.bounds().items()}
    in_store = [manifest for manifest in published.values() if manifest.blob is None]
    stored = still_stored(in_store) if in_store else set()
    return {
        version: manifest
        for version, manifest in published.items()
        if (version in stored if manifest.blob is None else manifest.blob.first_offset >= lows[manifest.blob.partition])
    }


def published_manifests(bus: Bus, run_id: str) -> dict[int, WeightManifest]:
    """All published versions, oldest first, with or without their weights. Raises DeadlineExceeded, TransportError."""
    newest = bus.newest(WEIGHTS, WeightManifest)
    found = {manifest.version: manifest for key, manifest in newest.items() if key == weights_key(run_id, manifest.version)}
    return dict(sorted(found.items()))


def obey_orders(evaluations: Evaluations, settings: Settings, orders: Mapping[str, Control]) -> None:
    """Obey those of `orders` that ask for an evaluation; an invalid one is skipped with a warning."""
    for control in orders.values():
        order = control.evaluation
        if order is not None and control.run_id == settings.run.name:
            try:
                evaluations.order(plan_order(settings, order), order.version)
            except (ValidationError, UserError) as exc:
                logger.warning("The order to evaluate %s, version %d, cannot be obeyed: %s", order.name, order.version, exc)
