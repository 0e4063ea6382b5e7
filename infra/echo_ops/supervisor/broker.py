"""The Kafka of a supervised run: the one that is named, the one that `echoswarm kafka up` started, or one of its own.

One thread at a time owns a `RunBroker`: whoever starts it hands it to whoever stops it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from echo_bus.embedded import EmbeddedKafka, Jit, Jvm, detached
from echo_bus.embedded.ports import free_ports
from echo_bus.embedded.properties import HOST
from echo_bus.embedded.state import read_state
from echo_bus.settings import Settings

logger = logging.getLogger(__name__)

# Below so many cores the JVM's second compiler costs the run more than it saves: four CPU seconds in the first half minute.
_FULL_JIT_FROM = 4


class RunBroker:
    """Knows the run's `bootstrap` from the start, so that the roles can be told before there is a broker; `start` makes it true."""

    def __init__(self, settings: Settings, *, num_cores: int, keep: bool, report: Callable[[str], None] = logger.info) -> None:
        self._keep = keep
        self._report = report
        self._own: EmbeddedKafka | None = None
        self._port: int | None = None
        self._jvm = Jvm(jit=Jit.FULL if num_cores >= _FULL_JIT_FROM else Jit.QUICK)
        if settings.kafka.bootstrap != "embedded":
            self.bootstrap = settings.kafka.bootstrap
            return
        state = read_state()
        if state is not None and state.running():
            self.bootstrap = state.bootstrap
            return
        (self._port,) = free_ports(1)
        self.bootstrap = f"{HOST}:{self._port}"

    def start(self) -> None:
        """Blocks until it answers; returns at once where it is not ours. Raises as `EmbeddedKafka.start`."""
        if self._port is None:
            return
        if self._keep:
            detached.up(ports=(self._port,), jvm=self._jvm, report=self._report)
        else:
            self._own = EmbeddedKafka(ports=(self._port,), jvm=self._jvm, report=self._report)
            self._own.start()

    def stop(self) -> None:
        """Stop it if it is ours and not to be kept. Idempotent."""
        if self._own is not None:
            self._own.stop()
            self._own = None
