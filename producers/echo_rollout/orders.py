"""What a worker is told on `control`: to take part, or to stand by."""

from __future__ import annotations

from echo_bus.reading.view import CompactedView
from echo_schemas.records import Control
from echo_schemas.topics import worker_order_key


class WorkerOrders:
    """The orders to one worker. Without any it takes part."""

    def __init__(self, control: CompactedView[Control], *, run_id: str, worker_id: str, void: str | None) -> None:
        """`control` is from `Bus.orders`, which passes over lower epochs. `void`: whose orders count for nothing: the coordinator's, in
        a run that has none any more, because nobody would take them back.
        """
        self._control = control
        self._key = worker_order_key(run_id, worker_id)
        self._void = void

    def wants_work(self) -> bool:
        """Whether the worker shall take requests. Raises what the view has failed with."""
        order = self._control.get(self._key)
        if order is None or order.worker is None or order.issued_by == self._void:
            return True
        return order.worker.active
