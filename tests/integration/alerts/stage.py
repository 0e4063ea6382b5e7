"""A run that a real Prometheus watches, and causes that make its alerts ring until they are mended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from echo_bus.clock import Deadline
from tests.chaos.cluster import ProxiedKafka
from tests.chaos.disk import SmallDisk
from tests.chaos.live_run import LiveRun, open_run
from tests.chaos.proxy import ProxyBank
from tests.integration.alerts.prometheus import Prometheus

WAIT_S = 300.0
_BROKER_S = 300.0
_DISK_MB = 64


@dataclass
class Stage(LiveRun):
    """The run's processes, its broker, the way to it that `proxied` roles take, and who watches."""

    kafka: ProxiedKafka
    proxies: ProxyBank
    prometheus: Prometheus

    @property
    def folder(self) -> Path:
        """Of the run and of everything else."""
        return self.swarm.folder

    @property
    def workers(self) -> list[str]:
        """Those that run."""
        return [name for name in self.swarm.names if name.startswith("worker") and self.swarm.is_running(name)]

    def start(self, *names: str) -> None:
        """Start roles, and wait until Prometheus has an answer of each."""
        for name in names:
            self.swarm.start(name)
        for name in names:
            self.wait_until(lambda name=name: self._answers(name), WAIT_S, f"{name} answers")  # type: ignore[misc]

    def restart(self, name: str) -> None:
        """Told to end, and started again."""
        self.swarm.child(name).terminate()
        self.swarm.wait_ended(self.swarm.child(name), Deadline.after(WAIT_S), self.wait)
        self.start(name)

    def end(self, name: str) -> None:
        """Told to end for good."""
        self.swarm.retire(name)
        self.swarm.wait_ended(self.swarm.child(name), Deadline.after(WAIT_S), self.wait)

    def goes_on(self, num_steps: int = 2) -> None:
        """Steps are made; who has ended by itself is started again."""
        self.wait_for(self.follower.version + num_steps, WAIT_S, "the run goes on")

    def command(self, *words: str, changes: Mapping[str, str] = MappingProxyType({})) -> str:
        """What `echoswarm` says of this run, under `changes`, settings as environment variables; fails where it does."""
        command = [sys.executable, "-m", "echo_ops.cli", *words, "-c", str(self.swarm.config)]
        done = subprocess.run(command, env={**self.swarm.environ, **changes}, capture_output=True, text=True, timeout=WAIT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def one(self, expression: str) -> float:
        """The value of the only series of an expression, once it is there."""
        self.wait_until(lambda: bool(self.prometheus.query(expression)), WAIT_S, f"{expression} has a value")
        (value,) = self.prometheus.query(expression)
        return value

    def rings(self, alert: str, labels: Mapping[str, str] = MappingProxyType({})) -> bool:
        """Whether an alert fires for these labels."""
        return any(labels.items() <= found.items() for found in self.prometheus.firing(alert))

    def await_alerts(self, case: Case, *, ring: bool) -> None:
        """Until all of a case's alerts ring, or none does."""
        started_s = self.bus.clock.monotonic_s()
        for alert, labels in case.alerts.items():
            what = f"{alert} {'rings' if ring else 'rests'}"
            self.wait_until(lambda alert=alert, labels=labels: self.rings(alert, labels) == ring, WAIT_S, what)  # type: ignore[misc]
            sys.stdout.write(f"{what} after {self.bus.clock.monotonic_s() - started_s:.0f} s\n")

    def _answers(self, name: str) -> bool:
        announced = self.swarm.announce(name)
        if not announced.exists():
            return False
        labels = json.loads(announced.read_text(encoding="utf-8"))[0]["labels"]
        return self.prometheus.targets().get(labels["process"]) == "up"


Alerts = Mapping[str, Mapping[str, str]]
Cause = Callable[[Stage], AbstractContextManager[None]]


@dataclass(frozen=True)
class Case:
    """What makes `alerts` ring, with these of their labels, inside its block; at its end it is mended as their runbooks say. `stands`: the
    run begins with it."""

    alerts: Alerts
    cause: Cause
    stands: bool


def cause_of(
    cases: list[Case], *alerts: str, stands: bool = False, **labelled: Mapping[str, str]
) -> Callable[[Callable[[Stage], Iterator[None]]], None]:
    """Add a generator function to `cases`: until its `yield` it causes, after it it mends. See `Case`."""

    def add(function: Callable[[Stage], Iterator[None]]) -> None:
        cases.append(Case({**dict.fromkeys(alerts, MappingProxyType({})), **labelled}, contextmanager(function), stands))

    return add


def see(stage: Stage, cases: list[Case]) -> None:
    """Each alert rests before its cause, rings with it, and rests again at the end."""
    for case in cases:
        if not case.stands:
            stage.await_alerts(case, ring=False)
        with case.cause(stage):
            stage.await_alerts(case, ring=True)
    for case in cases:
        stage.await_alerts(case, ring=False)
    assert {rule["health"] for rule in stage.prometheus.rules()} == {"ok"}


@contextmanager
def open_stage(
    folder: Path, config: Path, run: str, *, first: Callable[[str], bool], inside: Mapping[str, Mapping[str, str]]
) -> Iterator[Stage]:
    """A broker, and the run of `config` with the roles that `first` takes, begun. `inside`: further settings of roles by name;
    `{proxied}` in one stands for the way through the proxy. Everything is ended when the block is.
    """
    with ExitStack() as stack:
        stack.enter_context(SmallDisk(folder / "run", _DISK_MB))
        kafka = ProxiedKafka(num_brokers=1)
        kafka.start(timeout_s=_BROKER_S)
        stack.callback(kafka.stop)
        proxies = stack.enter_context(kafka.proxies())
        changes = {"ECHO_KAFKA__BOOTSTRAP": kafka.bootstrap, "ECHO_KAFKA__NAMESPACE": "alerts", "ECHO_RUN__NAME": run}
        wrapped = {
            name: ["env", *(f"{key}={value.format(proxied=kafka.proxied)}" for key, value in more.items())] for name, more in inside.items()
        }
        opened = stack.enter_context(open_run(folder, changes, config=config, inside=wrapped))
        prometheus = Prometheus(folder / "monitoring", [folder])
        stack.callback(prometheus.close)
        stage = Stage(swarm=opened.swarm, follower=opened.follower, bus=opened.bus, kafka=kafka, proxies=proxies, prometheus=prometheus)
        stage.start(*filter(first, stage.swarm.names))
        stage.goes_on()
        yield stage
