"""A run among three brokers, and everything that can be done to it.

    roles (processes) ──▶ proxies ──▶ three brokers ◀── this process: steps are followed, records forged, the log checked
       └ a worker may sit in a network namespace         └ checkpoints may lie on a small disk

One thread owns a scene.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_schemas.topic_files import load_topic_specs
from echo_schemas.topics import BY_NAME
from tests.chaos.cluster import ProxiedKafka
from tests.chaos.disk import SmallDisk
from tests.chaos.live_run import LiveRun, open_run
from tests.chaos.network import Namespace
from tests.chaos.proxy import ProxyBank
from tests.chaos.swarm import CONFIG

_DISK_MB = 64
# By process id, so that two suites on one machine have networks of their own.
_FIRST_SUBNET, _NUM_SUBNETS = 1, 250
_BROKERS_S = 300.0
_DUMP_S = 120.0


@dataclass
class Scene(LiveRun):
    """What a fault may touch. `without`: what this machine does not allow, and why. `is_attacked`: others have written to its topics."""

    kafka: ProxiedKafka
    proxies: ProxyBank
    disk: SmallDisk | None
    network: Namespace | None
    without: Mapping[str, str]
    is_attacked: bool = False


@contextmanager
def open_scene(
    folder: Path, changes: Mapping[str, str] | None = None, *, config: Path = CONFIG, has_faults: bool = True
) -> Iterator[Scene]:
    """Brokers, proxies and the run of `config`, begun; everything is ended when the block is. `changes`: settings as environment variables;
    without `has_faults` there is no small disk and no network namespace, and the proxies stand idle.
    """
    reasons = {"network": Namespace.why_not(), "disk": SmallDisk.why_not(folder)} if has_faults else dict.fromkeys(("network", "disk"), "-")
    without = {name: why for name, why in reasons.items() if why is not None}
    pid = os.getpid()
    with ExitStack() as stack:
        network = None if "network" in without else stack.enter_context(Namespace(f"ec{pid:x}"[-8:], _FIRST_SUBNET + pid % _NUM_SUBNETS))
        disk = None if "disk" in without else stack.enter_context(SmallDisk(folder / "run", _DISK_MB))
        kafka = ProxiedKafka() if network is None else ProxiedKafka(network.bridge_address)
        kafka.start(timeout_s=_BROKERS_S)
        stack.callback(kafka.stop)
        proxies = stack.enter_context(kafka.proxies())
        inside = {} if network is None else {"worker-0": network.command}
        addresses = {**(changes or {}), "ECHO_KAFKA__BOOTSTRAP": kafka.proxied if has_faults else kafka.bootstrap}
        run = stack.enter_context(open_run(folder, addresses, config=config, inside=inside, direct=kafka.bootstrap))
        run.swarm.start_all()
        yield Scene(
            swarm=run.swarm,
            follower=run.follower,
            bus=run.bus,
            kafka=kafka,
            proxies=proxies,
            disk=disk,
            network=network,
            without=without,
        )


def dump_log(bus: Bus, file: Path) -> int:
    """Every record that can still be read, one a line as JSON; how many."""
    every_run, num_records = replace(bus, run_id=None), 0
    with file.open("w", encoding="utf-8") as out:
        for spec in load_topic_specs():
            if spec.name not in BY_NAME:
                continue
            with closing(every_run.reader([BY_NAME[spec.name]])) as reader:
                reader.start()
                for batch in reader.read_to_end(Deadline.after(_DUMP_S)):
                    for message in batch:
                        where = message.coordinates
                        line = {"topic": spec.name, "partition": where.partition, "offset": where.offset, "record": repr(message.record)}
                        out.write(json.dumps(line) + "\n")
                        num_records += 1
    return num_records
