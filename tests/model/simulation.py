"""A world in which one thread runs at a time, on a clock of its own, so that the same seed gives the same run to the last call.

    task ── blocks, or is told to give way ──▶ the next ready task; when none is ready the clock jumps to the earliest deadline

Tasks are real threads that hand one baton around. The product's code runs in them unchanged: what it imports as `threading`, `time` and
`ThreadPoolExecutor` is replaced by what stands in `primitives` (see `installed`). Tasks belong to processes. A process can be killed: all
its tasks end at once, whatever they were doing, and none of their calls has an effect any more. It can be paused, as by SIGSTOP: none of
its tasks runs until it is resumed. The caller of all this, the test, is a task itself: the driver.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

# What a call to the cluster or the disk takes; so two calls never have the same time.
_CALL_S = 1e-4
# A task that holds the baton and hands it to nobody for so long, on a busy machine too, waits for the machine instead of the simulation.
_STUCK_S = 60.0
# Far above what any run here takes: something turns in circles.
_MAX_SWITCHES = 200_000


class Crash(BaseException):
    """The process dies here: nothing catches it."""


class Deadlock(AssertionError):
    """Every task waits, and none has a deadline."""


@dataclass(eq=False)
class Process:
    """What is killed and paused as a whole. `before_call` sees every call to the outside before it has an effect; it may kill or pause."""

    name: str
    skew_ms: int = 0
    dead: bool = False
    paused: bool = False
    calls: list[str] = field(default_factory=list)
    before_call: Callable[[Process, str], None] | None = None


class Task:
    """A thread of a process."""

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.baton = threading.Lock()
        self.baton.acquire()
        self.deadline_s: float | None = None
        self.is_done = False
        self.was_woken = False
        self.waits_for = ""
        self.joiners: list[Task] = []
        self.error: BaseException | None = None


class Simulation:
    """The scheduler and the clock. Without a seed the task that waited longest runs; with one, any, and calls are places to give way."""

    def __init__(self, seed: int | None = None) -> None:
        self.now_s = 0.0
        self.num_names = 0
        self.random = None if seed is None else random.Random(seed)
        self.driver = Task(Process("driver"), "driver")
        self.current = self.driver
        self._blocked: list[Task] = []
        self._ready: list[Task] = []
        self._tasks: list[Task] = []
        self._num_switches = 0
        self._failure: Deadlock | None = None

    # Tasks

    def spawn(self, process: Process, name: str, target: Callable[[], object]) -> Task:
        """A new task of `process`, ready to run."""
        task = Task(process, name)

        def run() -> None:
            task.baton.acquire()
            try:
                self._require_alive()
                target()
            except Crash:
                pass
            except BaseException as exc:  # the edge of the thread: `close` raises it
                task.error = exc
            self._end(task)

        self._tasks.append(task)
        self._ready.append(task)
        threading.Thread(target=run, name=name, daemon=True).start()
        return task

    def join(self, task: Task, timeout_s: float | None = None) -> bool:
        """Wait for the end of `task`; whether it came."""
        until_s = None if timeout_s is None else self.now_s + timeout_s
        while not task.is_done and (until_s is None or self.now_s < until_s):
            task.joiners.append(self.current)
            self.block(None if until_s is None else until_s - self.now_s, f"the end of {task.name}")
        return task.is_done

    def block(self, timeout_s: float | None, waits_for: str) -> bool:
        """Let others run until this task is woken or its time is over; whether it was woken. Raises Crash in a dead process."""
        task = self.current
        self._require_alive()
        task.deadline_s = None if timeout_s is None else self.now_s + max(0.0, timeout_s)
        task.was_woken, task.waits_for = False, waits_for
        self._blocked.append(task)
        self._switch(task)
        return task.was_woken

    def wake(self, task: Task) -> None:
        """End the task's `block`. One that does not block is left alone."""
        if task in self._blocked:
            self._blocked.remove(task)
            task.was_woken = True
            self._ready.append(task)

    def give_way(self) -> None:
        """Let another ready task run first."""
        task = self.current
        self._ready.append(task)
        self._switch(task)

    # Processes

    def call(self, operation: str) -> None:
        """A call of the current task to the outside is about to have its effect. Raises Crash in a process that is dead."""
        self._require_alive()
        process = self.current.process
        self.now_s += _CALL_S
        if process is self.driver.process:
            return
        process.calls.append(operation)
        if process.before_call is not None:
            process.before_call(process, operation)
        self._require_alive()
        if process.paused or (self.random is not None and self.random.random() < 0.2):
            self.give_way()

    def kill(self, process: Process) -> None:
        """End the process. What its tasks do while they unwind reaches nobody."""
        process.dead, process.paused = True, False
        for task in [task for task in self._blocked if task.process is process]:
            self.wake(task)

    def reap(self, process: Process) -> None:
        """Wait until all tasks of a dead process are gone."""
        for task in [task for task in self._tasks if task.process is process]:
            self.join(task)

    def close(self) -> None:
        """End everything. Raises what ended a task of a living process."""
        errors = [task.error for task in self._tasks if task.error is not None]
        for task in self._tasks:
            self.kill(task.process)
        for task in self._tasks:
            self.join(task)
        if errors:
            raise errors[0]

    # The baton

    def _switch(self, task: Task) -> None:
        chosen = self._choose()
        if chosen is not task:
            self.current = chosen
            chosen.baton.release()
            self._wait_for_turn(task)
        if self._failure is not None and task is self.driver:
            failure, self._failure = self._failure, None
            raise failure
        self._require_alive()

    def _wait_for_turn(self, task: Task) -> None:
        """The driver looks whether the others go on: a task that waits for a real lock or clock would hold up the test without a word."""
        while True:
            seen = self._num_switches
            if task.baton.acquire(timeout=_STUCK_S if task is self.driver else -1):
                return
            if seen == self._num_switches:
                held = self.current
                raise Deadlock(f"{held.process.name}/{held.name} waits for something that is not simulated; its stack says what.")

    def _choose(self) -> Task:
        self._num_switches += 1
        if self._num_switches > _MAX_SWITCHES:
            return self._fail("The simulation does not end")
        while True:
            able = [task for task in self._ready if not task.process.paused]
            if able:
                chosen = able[0] if self.random is None or len(able) == 1 else self.random.choice(able)
                self._ready.remove(chosen)
                return chosen
            timed = [task for task in self._blocked if task.deadline_s is not None and not task.process.paused]
            if not timed:
                return self._fail("Every task waits for ever")
            first = min(timed, key=lambda task: task.deadline_s or 0.0)
            self.now_s = max(self.now_s, first.deadline_s or 0.0)
            self._blocked.remove(first)
            self._ready.append(first)

    def _fail(self, why: str) -> Task:
        """Hand the baton to the driver, with what is wrong."""
        state = "; ".join(f"{task.process.name}/{task.name}: {task.waits_for}" for task in self._blocked)
        self._failure = Deadlock(f"{why}: {state}")
        self._num_switches = 0
        for queue in (self._blocked, self._ready):
            if self.driver in queue:
                queue.remove(self.driver)
        return self.driver

    def _end(self, task: Task) -> None:
        task.is_done = True
        for joiner in task.joiners:
            self.wake(joiner)
        self._tasks.remove(task)
        if task.error is not None and not task.process.dead:
            self._tasks.append(task)
        chosen = self._choose()
        self.current = chosen
        chosen.baton.release()

    def _require_alive(self) -> None:
        if self.current.process.dead:
            raise Crash
