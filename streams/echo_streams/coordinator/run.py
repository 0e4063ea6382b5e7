"""The coordinator's process."""

from __future__ import annotations

from contextlib import ExitStack, closing

from echo_runtime.process import RoleProcess
from echo_schemas.errors import UserError
from echo_schemas.records import WeightManifest, WorkerStatus
from echo_schemas.topics import STEPS, WEIGHTS, WORKERS, weights_key
from echo_settings.rules import staleness_policy
from echo_streams.coordinator.coordinator import Coordinator
from echo_streams.metrics import CoordinatorMetrics


def run_coordinator(process: RoleProcess) -> None:
    """Size the pool until `process.stop`.

    Raises UserError if the run's settings have no coordinator, and when another coordinator has taken over.
    """
    settings, bus = process.settings, process.bus
    if not settings.coordinator.enabled:
        raise UserError("This run has no coordinator: its workers would ignore the orders.", hint="Write [coordinator] enabled = true.")
    with ExitStack() as stack:
        writer = stack.enter_context(closing(bus.transactions("coordinator")))
        # Before `control` is read: a predecessor can write no order after this.
        writer.start()
        coordinator = Coordinator(
            settings=settings,
            policy=staleness_policy(settings),
            bus=bus,
            writer=writer,
            steps=stack.enter_context(closing(bus.reader([STEPS]))),
            weights=stack.enter_context(closing(bus.view(WEIGHTS, WeightManifest, only=weights_key(settings.run.name, None)))),
            workers=stack.enter_context(closing(bus.view(WORKERS, WorkerStatus))),
            control=stack.enter_context(closing(bus.orders())),
            notices=process.notices,
            metrics=CoordinatorMetrics(process.registry),
            clock=process.clock,
        )
        coordinator.run(process.stop)
