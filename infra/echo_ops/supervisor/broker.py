"""The Kafka of a supervised run: the one that is named, the one that `echoswarm kafka up` started, or one of its own.

One thread at a time owns a `RunBroker`: whoever starts it hands it to whoever stops it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from echo_embedded import EmbeddedKafka, Jit, Jvm, detached
from echo_embedded.ports import free_ports
from echo_embedded.properties import HOST
from echo_embedded.state import read_state
from echo_settings import Settings

logger = logging.getLogger(__name__)

# Below so many cores the JVM's second compiler costs the run more than it saves: four CPU seconds in the first half minute.
_FULL_JIT_FROM = 4


def given_bootstrap(bootstrap: str) -> str | None:
    """Where a run finds its Kafka that outlives it: the one that is named, or the one that `echoswarm kafka up` started; None: nowhere."""
    if bootstrap != "embedded":
        return bootstrap
    state = read_state()
    return state.bootstrap if state is not None and state.running() else None


class RunBroker:
    """Knows the run's `bootstrap` from the start, so that the roles can be told before there is a broker; `start` makes it true."""

    def __init__(
        self,
        settings: Settings,
        *,
        num_cores: int,
        keep: bool,
        folder: Path | None = None,
        report: Callable[[str], None] = logger.info,
    ) -> None:
        """`keep`: leave one of its own running. `folder`: where one of its own keeps its data; none: nowhere."""
        self._keep = keep
        self._report = report
        self._own: EmbeddedKafka | None = None
        self._port: int | None = None
        self._jvm = Jvm(jit=Jit.FULL if num_cores >= _FULL_JIT_FROM else Jit.QUICK)
        self._folder = folder
        given = given_bootstrap(settings.kafka.bootstrap)
        if given is not None:
            self.bootstrap = given
            return
        (self._port,) = free_ports(1)
        self.bootstrap = f"{HOST}:{self._port}"

    def start(self) -> None:
        """Blocks until it answers; returns at once where it is not ours. Raises as `EmbeddedKafka.start`."""
        if self._port is None:
            return
        if self._keep:
            detached.up(1, ports=(self._port,), jvm=self._jvm, report=self._report)
        else:
            self._own = EmbeddedKafka(folder=self._folder, ports=(self._port,), jvm=self._jvm, report=self._report)
            self._own.start()

    def stop(self) -> None:
        """Stop it if it is ours and not to be kept. Idempotent."""
        if self._own is not None:
            self._own.stop()
            self._own = None
