"""What the product takes from `threading`, `time` and `concurrent.futures`, on a simulation instead of the machine."""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from tests.model.simulation import Process, Simulation, Task

# Every package of the product: one that is left out waits for the machine's clock, and the simulation for it (`Simulation._wait_for_turn`).
_PACKAGES = ("echo_", "tests.model.workers")
# The memory cluster looks up now and then, in case nobody told it of a change; here everybody does.
_CONSTANTS = (("echo_memory.consumer", "_POLL_STEP_S", 60.0), ("echo_memory.producer", "_POLL_STEP_S", 60.0))
# Executors whose work goes on while their owner does something else.
_BESIDE = frozenset({"publication"})
_START_MS = 1_700_000_000_000


class World:
    """The simulation that the primitives run on now."""

    simulation = Simulation()


def _now() -> Simulation:
    return World.simulation


class RLock:
    """Held by one task, any number of times."""

    def __init__(self) -> None:
        self._owner: Task | None = None
        self._count = 0
        self._waiters: deque[Task] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, waiting for its owner. What a dead process held is free for its own other tasks, which unwind."""
        simulation = _now()
        me = simulation.current
        while self._owner is not None and self._owner is not me and not self._owner.process.dead:
            if not blocking:
                return False
            self._waiters.append(me)
            simulation.block(None if timeout < 0 else timeout, f"a lock of {self._owner.name}")
        self._count = self._count + 1 if self._owner is me else 1
        self._owner = me
        return True

    def release(self) -> None:
        """Give it back."""
        self._count -= 1
        if self._count <= 0:
            self._owner, self._count = None, 0
            while self._waiters:
                _now().wake(self._waiters.popleft())

    def release_all(self) -> int:
        """Give it back whole; how often it was taken."""
        count, self._count = self._count, 1
        self.release()
        return count

    def acquire_again(self, count: int) -> None:
        """Take it as often as it was."""
        self.acquire()
        self._count = count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Condition:
    """threading.Condition."""

    def __init__(self, lock: RLock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: list[Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Until notified."""
        simulation = _now()
        task = simulation.current
        count = self._lock.release_all()
        self._waiters.append(task)
        try:
            return simulation.block(timeout, "a condition")
        finally:
            if task in self._waiters:
                self._waiters.remove(task)
            self._lock.acquire_again(count)

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        """Until the predicate holds; its value."""
        until_s = None if timeout is None else _now().now_s + timeout
        found = predicate()
        while not found:
            left_s = None if until_s is None else until_s - _now().now_s
            if left_s is not None and left_s <= 0:
                break
            self.wait(left_s)
            found = predicate()
        return found

    def notify(self, n: int = 1) -> None:
        """Wake `n` waiters."""
        woken, self._waiters = self._waiters[:n], self._waiters[n:]
        for task in woken:
            _now().wake(task)

    def notify_all(self) -> None:
        """Wake all."""
        self.notify(len(self._waiters))


class Event:
    """threading.Event."""

    def __init__(self) -> None:
        self._condition = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Set it."""
        self._is_set = True
        self._condition.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it is set."""
        with self._condition:
            return bool(self._condition.wait_for(lambda: self._is_set, timeout))


class Thread:
    """threading.Thread, in the process of whoever starts it."""

    def __init__(
        self,
        *,
        target: Callable[..., object],
        name: str = "thread",
        args: tuple[Any, ...] = (),
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self._run = lambda: target(*args)
        self._task: Task | None = None

    def start(self) -> None:
        """Begin."""
        simulation = _now()
        self._task = simulation.spawn(simulation.current.process, self.name, self._run)

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""
        assert self._task is not None
        _now().join(self._task, timeout)

    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._task is not None and not self._task.is_done


class Future:
    """concurrent.futures.Future, as far as it is used."""

    def __init__(self) -> None:
        self._event = Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self, work: Callable[[], Any]) -> None:
        """Settle it."""
        try:
            self._result = work()
        except BaseException as exc:  # whatever it is, it belongs to whoever asks for the result
            self._error = exc
        self._event.set()

    def done(self) -> bool:
        """Whether it is settled."""
        return self._event.is_set()

    def result(self, timeout: float | None = None) -> Any:
        """What came of it."""
        self._event.wait(timeout)
        if self._error is not None:
            raise self._error
        return self._result


class Executor:
    """ThreadPoolExecutor. What is only computed beside something else is computed at once: it makes no calls to the outside."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "") -> None:
        self._name = thread_name_prefix
        self._threads: list[Thread] = []

    def submit(self, work: Callable[..., Any], *args: Any) -> Future:
        """Do it, one thing at a time."""
        future = Future()
        if self._name not in _BESIDE:
            future.run(lambda: work(*args))
            return future
        for before in self._threads:
            before.join()
        thread = Thread(target=future.run, name=self._name, args=(lambda: work(*args),))
        self._threads = [thread]
        thread.start()
        return future

    def __enter__(self) -> Executor:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def map(self, work: Callable[..., Any], items: Iterable[Any]) -> Iterator[Any]:
        """The built-in map."""
        return map(work, items)

    def shutdown(self, wait: bool = True, cancel_futures: bool = False) -> None:
        """Wait for what is under way."""
        for thread in self._threads:
            thread.join()


class SimulatedThreading:
    """Stands where a module says `threading`."""

    Lock = RLock = RLock
    Condition = Condition
    Event = Event
    Thread = Thread

    @staticmethod
    def current_thread() -> Task:
        """Something with a name."""
        return _now().current


class SimulatedTime:
    """Stands where a module says `time`."""

    @staticmethod
    def monotonic() -> float:
        """Seconds since the world began."""
        return _now().now_s

    @staticmethod
    def time_ns() -> int:
        """Wall time as the current process has it."""
        simulation = _now()
        return (_START_MS + simulation.current.process.skew_ms) * 1_000_000 + int(simulation.now_s * 1e9)

    @staticmethod
    def thread_time() -> float:
        """Nothing costs anything here."""
        return 0.0

    perf_counter = monotonic


class SimulatedSecrets:
    """Stands where a module says `secrets`: names that do not repeat within a run, and are the same in the next."""

    @staticmethod
    def token_hex(num_bytes: int) -> str:
        """The next one."""
        simulation = _now()
        simulation.num_names += 1
        return f"{simulation.num_names:0{2 * num_bytes}x}"


@contextmanager
def installed() -> Iterator[None]:
    """The product's modules that are loaded use the primitives of this one until the block ends."""
    replaced: list[tuple[Any, str, Any]] = []
    fakes = {
        "threading": (threading, SimulatedThreading),
        "time": (time, SimulatedTime),
        "secrets": (secrets, SimulatedSecrets),
        "ThreadPoolExecutor": (ThreadPoolExecutor, Executor),
    }
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith(_PACKAGES):
            for name, (real, fake) in fakes.items():
                if getattr(module, name, None) is real:
                    replaced.append((module, name, real))
                    setattr(module, name, fake)
    for loaded_name, name, value in _CONSTANTS:
        loaded = sys.modules[loaded_name]
        replaced.append((loaded, name, getattr(loaded, name)))
        setattr(loaded, name, value)
    try:
        yield
    finally:
        for module, name, real in replaced:
            setattr(module, name, real)


__all__ = ["Process", "World", "installed"]
