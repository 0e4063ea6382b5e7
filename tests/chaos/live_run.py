"""A run whose every role is a process of its own, watched by its steps. One thread owns it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from echo_bus.bus import Bus
from echo_bus.clock import Deadline
from echo_ops.supervisor.registration import make_topics
from echo_runtime.opening import open_bus, open_cluster
from tests.chaos.follower import Follower
from tests.chaos.swarm import CONFIG, Swarm

_TICK_S = 0.05


@dataclass
class LiveRun:
    """The processes, how far they are, and the run's topics."""

    swarm: Swarm
    follower: Follower
    bus: Bus

    def __post_init__(self) -> None:
        self._never = threading.Event()

    def pause(self, seconds: float) -> None:
        """Let time pass; who ends by itself meanwhile is started again."""
        deadline = Deadline.after(seconds)
        while True:
            self.swarm.tend()
            if self._never.wait(min(_TICK_S, deadline.remaining_s())) or deadline.expired():
                return

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self._never.wait(seconds)

    def wait_for(self, version: int, within_s: float, what: str) -> None:
        """Until a step to `version` is in the log. Fails with what the roles said last."""
        deadline = Deadline.after(within_s)
        while not self.follower.wait_for(version, deadline):
            self.swarm.tend()
            assert not deadline.expired(), (
                f"{what}: waited {within_s:g} s for version {version}, and the log is at {self.follower.version}. "
                f"Ended by themselves: {[str(each) for each in self.swarm.exits] or 'nobody'}. Logs: {self.swarm.folder / 'logs'}"
            )

    def wait_until(self, condition: Callable[[], bool], within_s: float, what: str) -> None:
        """Until `condition` holds."""
        deadline = Deadline.after(within_s)
        while not condition():
            assert not deadline.expired(), f"waited {within_s:g} s until {what}. Logs: {self.swarm.folder / 'logs'}"
            self._never.wait(_TICK_S)


@contextmanager
def open_run(
    folder: Path,
    changes: Mapping[str, str],
    *,
    config: Path = CONFIG,
    inside: Mapping[str, Sequence[str]] = MappingProxyType({}),
    direct: str = "",
) -> Iterator[LiveRun]:
    """The run of `config` with its topics made and nothing started; everything is ended when the block is. `changes`: settings as
    environment variables; `inside`: see Swarm; `direct`: brokers for this process alone.
    """
    with ExitStack() as stack:
        swarm = Swarm(folder, changes, config=config, inside=inside)
        stack.callback(swarm.close)
        settings = swarm.settings
        if direct:
            settings = settings.model_copy(update={"kafka": settings.kafka.model_copy(update={"bootstrap": direct})})
        bus = open_bus(settings, "view")
        make_topics(open_cluster(settings), bus.namespace)
        yield LiveRun(swarm=swarm, follower=stack.enter_context(Follower(bus)), bus=bus)
