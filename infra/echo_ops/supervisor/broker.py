"""The Kafka of a supervised run: that of the settings, that of `echoswarm kafka up`, or one that ends with the run.

One thread at a time uses a `RunBroker`: the thread that starts it hands it to the thread that stops it.
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

# On fewer cores the JVM's second compiler costs the run more than it saves: four CPU seconds in the first half minute.
_FULL_JIT_FROM = 4


def given_bootstrap(bootstrap: str) -> str | None:
    """Address of a Kafka that outlives the run: the one of the settings, or the one of `echoswarm kafka up`; None: there is none."""
    if bootstrap != "embedded":
        return bootstrap
    state = read_state()
    return state.bootstrap if state is not None and state.running() else None


class RunBroker:
    """Has the run's `bootstrap` at once, so that the roles can start before the broker answers there."""

    def __init__(
        self,
        settings: Settings,
        *,
        num_cores: int,
        keep: bool,
        folder: Path | None = None,
        report: Callable[[str], None] = logger.info,
    ) -> None:
        """For a Kafka that the run starts: `keep` leaves it running, `folder` keeps its data (None: the data goes with it)."""
        self._keep = keep
        self._report = report
        self._own: EmbeddedKafka | None = None
        self._goes_on = False
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
        """Block until it answers; return at once if it outlives the run. Raises as `EmbeddedKafka.start`."""
        if self._port is None:
            return
        if self._keep:
            detached.up(1, ports=(self._port,), jvm=self._jvm, report=self._report)
            self._goes_on = True
        else:
            self._own = EmbeddedKafka(folder=self._folder, ports=(self._port,), jvm=self._jvm, report=self._report)
            self._own.start()

    def stop(self) -> None:
        """Stop a Kafka that `start` started, or say how one that is kept is stopped. Idempotent."""
        if self._goes_on:
            self._goes_on = False
            self._report(f"Kafka goes on at {self.bootstrap}. `echoswarm kafka down` stops it.")
        if self._own is not None:
            self._own.stop()
            self._own = None
