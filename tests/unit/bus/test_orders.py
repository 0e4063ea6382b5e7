"""Orders are read in one way, by whatever role: lower epochs are ignored."""

from __future__ import annotations

from contextlib import closing

from confluent_kafka.admin import NewTopic

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_memory import MemoryCluster
from echo_schemas.naming import Namespace
from echo_schemas.records import Control, RunControl, RunState
from echo_schemas.topics import CONTROL

SPACE = Namespace("echo.test")
KEY = "demo/run"
WAIT_S = 30.0


def order(epoch: int, state: RunState) -> Control:
    return Control(run_id="demo", epoch=epoch, run=RunControl(state=state), issued_by="test", time_ms=epoch)


def test_a_lower_epoch_is_ignored_at_the_start_and_later() -> None:
    cluster = MemoryCluster()
    cluster.admin().create_topics([NewTopic(SPACE.topic(CONTROL), num_partitions=1, replication_factor=1)])
    bus = Bus(
        cluster=cluster, namespace=SPACE, role="learner", run_id="demo"
    )  # fmt: skip
    with closing(bus.publisher()) as publisher:
        publisher.publish(CONTROL, order(5, RunState.PAUSED))
        publisher.publish(CONTROL, order(4, RunState.STOPPING)).wait(WAIT_S)
        with closing(bus.orders()) as orders:
            heard: list[Control | None] = []
            orders.on_change(lambda _key, control: heard.append(control))
            assert orders.get(KEY) == order(5, RunState.PAUSED)
            publisher.publish(CONTROL, order(3, RunState.STOPPING))
            publisher.publish(CONTROL, order(5, RunState.RUNNING)).wait(WAIT_S)
            orders.wait_for(KEY, lambda control: control.run is not None and control.run.state is RunState.RUNNING, Deadline.after(WAIT_S))
            assert heard == [order(5, RunState.RUNNING)]
