"""The common parts of every role's process: a bus, metrics over HTTP, a stop signal, and an announcement of its address.

Threads: `open_role` runs on the main thread, where Python delivers signals; any thread may read `StopSignal` and wait for it.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from echo_bus.bus import Bus
from echo_bus.clock import Clock, SystemClock
from echo_bus.metrics import BusMetrics
from echo_runtime.announcement import Announcement
from echo_runtime.logins import with_login
from echo_runtime.notices import Notices
from echo_runtime.opening import open_bus
from echo_runtime.places import PlaceTimes
from echo_runtime.server import Check, MetricsServer
from echo_runtime.signals import drain_on_signals
from echo_runtime.tracing import open_tracer
from echo_settings import Settings

logger = logging.getLogger(__name__)
# Prometheus usually asks every 15 s or sooner. Where it asks only every minute, the end of a process does not wait for it.
_LAST_SCRAPE_S = 15.0


class StopSignal:
    """Set once, by SIGTERM, SIGINT or the role itself; callbacks wake threads that block elsewhere."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._callbacks: tuple[Callable[[], object], ...] = ()

    def set(self) -> None:
        self._event.set()
        # No lock: `on_set` may be running on another thread.
        for callback in self._callbacks:
            callback()

    def on_set(self, callback: Callable[[], object]) -> None:
        """Call `callback` at `set`, or now if it is set; on any thread, perhaps twice, so it must be short and idempotent."""
        self._callbacks += (callback,)
        if self._event.is_set():
            callback()

    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait for `set`, at most `timeout_s`; returns whether it is set."""
        return self._event.wait(timeout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleProcess:
    """The parts of a role's process. The role may add `ready_checks` until it is ready: name → None or a sentence. `notices`: problems that
    are no reason to restart the process. `start`: the name of the common start of all roles; empty: the process was started alone
    (`echo_runtime.ownership`).
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
    scratch: list[Path] = field(default_factory=list)
    """Folders that are removed even if the process has to end at once, because its drain takes too long."""


@contextmanager
def open_role(
    settings: Settings, role: str, *, name: str | None = None, announce: Path | None = None, start: str = ""
) -> Iterator[RoleProcess]:
    """The parts of a role's process, until the block ends. `role`: of roles.yaml; `name` distinguishes processes of one role in client ids.

    `announce`: the file for this process's `Announcement`, written once the metrics server listens. It goes with a process that was told to
    end; that of one that was killed or failed stays, so that monitoring reports it as missing. One that fails waits until Prometheus has
    asked it once more, if it does at all. `start`: see `RoleProcess`. On the main
    thread the first SIGTERM or SIGINT sets `stop`; the second one, or the end of [run] drain_s, ends the process.
    """

    scratch: list[Path] = []

    def exit_now(code: int) -> None:
        if announce is not None:
            announce.unlink(missing_ok=True)
        for folder in scratch:
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(code)

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
        healthy=healthy,
        ready=ready,
        notices=notices.current,
    )
    draining = drain_on_signals(stop.set, limit_s=settings.run.drain_s, exit_now=exit_now)
    with open_tracer(settings, role, full_name) as tracer, draining, server:
        logger.info("%s: metrics at %s/metrics", full_name, server.url)
        if announce is not None:
            target = server.url.removeprefix("http://")
            namespace, run = bus.namespace.name, settings.run.name
            Announcement(target=target, namespace=namespace, run=run, role=role, process=full_name, pid=os.getpid()).write(announce)
        try:
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
                scratch=scratch,
                notices=notices,
            )
        except Exception:  # whatever ends a role: what it counted last is what alerts are about
            server.await_scrape(_LAST_SCRAPE_S, stop.on_set)
            raise
        if announce is not None:
            announce.unlink(missing_ok=True)
