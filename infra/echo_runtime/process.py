"""What every role's process has in common: a bus, metrics over HTTP, a stop signal, and a note of where it can be found.

Threads: `open_role` runs on the main thread, where Python delivers signals; `StopSignal` may be read and waited on from any.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from echo_bus.bus import Bus
from echo_bus.clock import Clock, SystemClock
from echo_bus.metrics import BusMetrics
from echo_runtime.announcement import announcement_of_this_process
from echo_runtime.logins import with_login
from echo_runtime.notices import Notices
from echo_runtime.opening import open_bus
from echo_runtime.places import PlaceTimes
from echo_runtime.server import Check, MetricsServer
from echo_runtime.signals import drain_on_signals
from echo_runtime.tracing import open_tracer
from echo_settings import Settings

logger = logging.getLogger(__name__)


@contextmanager
def without_collection() -> Iterator[None]:
    """For imports and other building at a process's start: the garbage collector rests meanwhile, and never looks at what was made.

    It would go through hundreds of thousands of objects that stay, again and again: a seventh of the time that vLLM's imports take.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


class StopSignal:
    """Set once, by SIGTERM, SIGINT or the role itself; callbacks wake whoever blocks elsewhere."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._callbacks: tuple[Callable[[], object], ...] = ()

    def set(self) -> None:
        """Ask the role to drain and end."""
        self._event.set()
        # No lock: `on_set` may be running on another thread.
        for callback in self._callbacks:
            callback()

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the request to end comes, or now if it has; any thread, perhaps twice, so it is quick and idempotent."""
        self._callbacks += (callback,)
        if self._event.is_set():
            callback()

    def is_set(self) -> bool:
        """Whether the role was asked to end."""
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the request to end, at most `timeout_s`; whether it came."""
        return self._event.wait(timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleProcess:
    """What a role works with. `ready_checks` may be added to until the role is ready: name → None or a sentence. `notices`: what stands
    still or fails without being a reason to restart the process. `start` names the start of all roles that this process is part of; empty:
    it was started by itself (`echo_runtime.ownership`).
    """

    settings: Settings
    bus: Bus
    registry: CollectorRegistry
    places: PlaceTimes
    clock: Clock
    stop: StopSignal
    ready_checks: dict[str, Check] = field(default_factory=dict)
    health_checks: dict[str, Check] = field(default_factory=dict)
    start: str = ""
    notices: Notices = field(default_factory=Notices)


@contextmanager
def open_role(
    settings: Settings, role: str, *, name: str | None = None, announce: Path | None = None, start: str = ""
) -> Iterator[RoleProcess]:
    """Everything a role needs, until the block ends. `role` is one of roles.yaml; `name` tells several of a kind apart in client ids.
    `start`: see `RoleProcess`.

    `announce`: a file that gets this process's `Announcement` once the metrics server listens. On the main thread the first
    SIGTERM or SIGINT sets `stop`; the second ends the process, and so does the end of [run] drain_s.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    clock = SystemClock()
    settings = with_login(settings, role)
    full_name = f"{role}.{name}" if name else role
    notices = Notices(clock)
    bus = open_bus(settings, full_name, metrics=BusMetrics(registry), clock=clock, notices=notices)
    stop = StopSignal()
    ready: dict[str, Check] = {}
    healthy: dict[str, Check] = {}
    server = MetricsServer(
        registry,
        host=settings.metrics.host,
        port=settings.metrics.port,
        healthy=_live(healthy),
        ready=_live(ready),
        notices=notices.current,
    )
    with open_tracer(settings, role, full_name) as tracer, drain_on_signals(stop.set, limit_s=settings.run.drain_s), server:
        logger.info("%s: metrics at %s/metrics", full_name, server.url)
        if announce is not None:
            announcement_of_this_process(
                url=server.url, namespace=bus.namespace.name, run=settings.run.name, role=role, process=full_name
            ).write(announce)
        yield RoleProcess(
            settings=settings,
            bus=replace(bus, tracer=tracer),
            registry=registry,
            places=PlaceTimes(registry, clock),
            clock=clock,
            stop=stop,
            ready_checks=ready,
            health_checks=healthy,
            start=start,
            notices=notices,
        )
        # One that was killed, or ended with an error, is missed by whoever watches; one that ended well is not.
        if announce is not None:
            announce.unlink(missing_ok=True)


def _live(checks: Mapping[str, Check]) -> dict[str, Check]:
    """One check that asks all of `checks`, those added later included."""

    def ask() -> str | None:
        problems = [f"{name}: {problem}" for name, check in list(checks.items()) if (problem := check()) is not None]
        return " ".join(problems) or None

    return {"role": ask}
