"""Scoring processes: what hangs or dies takes only its own call along, and none of them outlives its parent."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from echo_bus.clock import Deadline, ManualClock
from echo_schemas.errors import UserError
from echo_schemas.records import RewardOutcome
from echo_settings.sections import ScoringSettings
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import CallTimedOut, Failure, ProcessDied, ScoringPool
from echo_streams.run import attach
from echo_streams.scoring import Scorer
from echo_streams.values import Score
from echo_tasks.catalogue import load_reward
from echo_tasks.rewards import RewardFunction, ScoredSample, sample_of
from tests.unit.core.records import trajectory
from tests.unit.streams.stage import attached, judgeable, sample, values

WAIT_S = 180.0
FUNCTIONS = '''
import os
import time
from pathlib import Path

from echo_tasks.rewards import reward


@reward(name="mixed")
def mixed(sample):
    """What the completion asks for."""
    what = sample.completion
    if what == "hang":
        time.sleep(600)
    if what == "die":
        os._exit(3)
    if what == "exit":
        raise SystemExit(3)
    if what == "raise":
        raise ValueError("no judge today")
    if what == "nan":
        return float("nan")
    return float(what)


@reward(name="once", timeout_s=0.2)
def hangs_once(sample):
    if not Path("hung").exists():
        Path("hung").touch()
        time.sleep(600)
    return 1.0


@reward(name="dies")
def dies_once(sample):
    if not Path("died").exists():
        Path("died").touch()
        os._exit(3)
    return 1.0


@reward(name="lengths", batch=True)
def lengths(samples):
    return [float(len(sample.completion)) for sample in samples]


@reward(name="greedy")
def greedy(sample):
    print("x" * (1 << 20))
    return float(len(bytearray(2 << 30)))


@reward(name="pid")
def pid(sample):
    return float(os.getpid())


@reward(name="forks")
def forks(sample):
    """Returns in two processes."""
    child = os.fork()
    if child:
        with open("children", "a") as file:
            file.write(f"{child}\\n")
    if sample.completion == "hang":
        time.sleep(600)
    return 1.0 if child else 3.0
'''
CHILD = """
import asyncio, sys
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import ScoringPool
from echo_tasks.catalogue import load_reward
from echo_tasks.rewards import sample_of
from tests.unit.core.records import trajectory

async def main():
    function = load_reward("functions_of_pool.py:pid")
    pool = ScoringPool([function], num_processes=1, metrics=StreamsMetrics())
    await pool.start()
    (score,) = await pool.call(function, sample_of(trajectory()), 60)
    print(int(score.value), flush=True)
    await asyncio.Event().wait()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], RewardFunction]:
    (tmp_path / "functions_of_pool.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "echo_user_functions_of_pool", raising=False)
    return lambda name: load_reward(f"functions_of_pool.py:{name}")


@asynccontextmanager
async def open_pool(
    *functions: RewardFunction, metrics: StreamsMetrics | None = None, num_processes: int = 1, memory_mb: int = 0
) -> AsyncIterator[ScoringPool]:
    pool = ScoringPool(functions, num_processes=num_processes, metrics=metrics or StreamsMetrics(), memory_mb=memory_mb)
    await pool.start()
    try:
        yield pool
    finally:
        pool.close()


def play(coroutine: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await coroutine

    asyncio.run(bounded())


def of(completion: str) -> ScoredSample:
    return sample_of(trajectory(completion=completion))


def test_every_end_of_a_call_has_its_answer_and_the_pool_goes_on(functions: Callable[[str], RewardFunction]) -> None:
    mixed, lengths, metrics = functions("mixed"), functions("lengths"), StreamsMetrics()

    async def run() -> None:
        async with open_pool(mixed, lengths, metrics=metrics) as pool:
            assert await pool.call(mixed, of("0.5"), WAIT_S) == [Score(0.5)]
            assert await pool.call(lengths, [of("four"), of("")], WAIT_S) == [Score(4.0), Score(0.0)]
            assert await pool.call(mixed, of("raise"), WAIT_S) == Failure("ValueError: no judge today")
            assert await pool.call(mixed, of("exit"), WAIT_S) == Failure("SystemExit: 3")
            assert await pool.call(mixed, of("nan"), WAIT_S) == Failure("The value is nan; a reward must be finite.", again=False)
            with pytest.raises(CallTimedOut):
                await pool.call(mixed, of("hang"), 0.2)
            assert await pool.call(mixed, of("1"), WAIT_S) == [Score(1.0)]
            with pytest.raises(ProcessDied):
                await pool.call(mixed, of("die"), WAIT_S)
            assert await pool.call(mixed, of("2"), WAIT_S) == [Score(2.0)]

    play(run())
    assert [sample(metrics, "echo_streams_pool_restarts_total", reason=reason) for reason in ("hung", "died")] == [1, 1]


def test_a_function_that_forks_answers_once_and_leaves_no_process(functions: Callable[[str], RewardFunction]) -> None:
    forks = functions("forks")

    async def run() -> None:
        async with open_pool(forks) as pool:
            for _ in range(3):
                assert await pool.call(forks, of("1"), WAIT_S) == [Score(1.0)]
            with pytest.raises(CallTimedOut):
                await pool.call(forks, of("hang"), 2.0)

    play(run())
    children, deadline = [int(line) for line in Path("children").read_text(encoding="utf-8").split()], Deadline.after(WAIT_S)
    assert len(children) == 4
    while any(map(is_running, children)):
        assert not deadline.expired(), "waited for the forked processes to end"


def test_seconds_are_those_of_the_calls_without_waiting_for_a_process(functions: Callable[[str], RewardFunction]) -> None:
    mixed = functions("mixed")

    async def run() -> None:
        async with open_pool(mixed) as pool:
            limits = ScoringSettings(timeout_s=WAIT_S, retries=0)
            scorer = Scorer([attached(mixed)], run_id="demo", limits=limits, metrics=StreamsMetrics(), clock=ManualClock(), pool=pool)
            started_s = time.perf_counter()
            found = await scorer.score(judgeable(12))
            # One process does them one after another.
            assert all(each.seconds > 0 for each in found)
            assert sum(each.seconds for each in found) <= time.perf_counter() - started_s

    play(run())


def test_beside_one_that_hangs_the_others_answer(functions: Callable[[str], RewardFunction]) -> None:
    mixed, pid = functions("mixed"), functions("pid")

    async def run() -> None:
        async with open_pool(mixed, pid, num_processes=2) as pool:
            hanging = asyncio.create_task(pool.call(mixed, of("hang"), WAIT_S))
            answers = [await pool.call(pid, of(""), WAIT_S) for _ in range(3)]
            assert not hanging.done()
            assert len({answer[0].value for answer in answers if not isinstance(answer, Failure)}) == 1
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging

    play(run())


def test_outcomes_of_the_scorer_on_processes(functions: Callable[[str], RewardFunction]) -> None:
    """A time-out is not tried again, a death is."""
    hangs, dies, mixed, metrics = functions("hangs_once"), functions("dies_once"), functions("mixed"), StreamsMetrics()

    async def run() -> None:
        async with open_pool(hangs, dies, mixed, metrics=metrics) as pool:
            limits = ScoringSettings(timeout_s=WAIT_S)
            work = {
                name: Scorer([attached(function, name)], run_id="demo", limits=limits, metrics=metrics, clock=ManualClock(), pool=pool)
                for name, function in (("hangs", hangs), ("dies", dies), ("mixed", mixed))
            }
            (hung,) = await work["hangs"].score(judgeable())
            (died,) = await work["dies"].score(judgeable())
            assert (hung.outcome, hung.error) == (RewardOutcome.TIMED_OUT, "No answer within 0.2 s.")
            assert (died.outcome, died.value) == (RewardOutcome.SCORED, 1.0)
            assert values(await work["mixed"].score(judgeable(20))) == [float(number) for number in range(20)]

    play(run())
    assert sample(metrics, "echo_streams_retries_total", name="dies") == 1


def test_a_function_that_only_the_parent_can_import_is_refused_at_the_start(functions: Callable[[str], RewardFunction]) -> None:
    function = functions("mixed")
    Path("functions_of_pool.py").unlink()

    async def run() -> None:
        with pytest.raises(UserError, match=r"cannot import its rewards: There is no Python file functions_of_pool\.py"):
            await ScoringPool([function], num_processes=1, metrics=StreamsMetrics()).start()

    play(run())


def test_a_module_that_ends_the_process_on_import_is_refused_at_the_start(functions: Callable[[str], RewardFunction]) -> None:
    function = functions("mixed")
    Path("functions_of_pool.py").write_text("import os\n\nos._exit(3)\n", encoding="utf-8")

    async def run() -> None:
        with pytest.raises(UserError, match="Does importing the reward's module end the process"):
            await ScoringPool([function], num_processes=1, metrics=StreamsMetrics()).start()

    play(run())


def test_a_process_that_never_ends_its_import_is_ended(functions: Callable[[str], RewardFunction], monkeypatch: pytest.MonkeyPatch) -> None:
    """If it stayed, this process could not end: Python waits for it."""
    function, before = functions("mixed"), set(multiprocessing.active_children())
    Path("functions_of_pool.py").write_text("import time\n\ntime.sleep(3600)\n", encoding="utf-8")
    monkeypatch.setattr("echo_streams.pool.START_TIMEOUT_S", 4.0)

    async def run() -> None:
        with pytest.raises(UserError, match=r"did not start \(TimeoutError\)"):
            await ScoringPool([function], num_processes=1, metrics=StreamsMetrics()).start()

    play(run())
    deadline = Deadline.after(WAIT_S)
    while set(multiprocessing.active_children()) - before:
        assert not deadline.expired(), "waited for the scoring process to end"


@pytest.mark.usefixtures("functions")
def test_scoring_processes_end_with_their_parent_however_it_ends() -> None:
    Path("parent.py").write_text(CHILD, encoding="utf-8")
    root = Path(__file__).parents[3]
    environ = {**os.environ, "PYTHONPATH": str(root)}
    with subprocess.Popen([sys.executable, "parent.py"], stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        scoring = int(parent.stdout.readline())
        assert is_running(scoring)
        parent.send_signal(signal.SIGKILL)
        parent.wait(WAIT_S)
        deadline = Deadline.after(WAIT_S)
        while is_running(scoring):
            assert not deadline.expired(), "waited for the scoring process to end"


def is_running(pid: int) -> bool:
    """Neither gone nor a zombie that nobody waits for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_processes_run_what_the_settings_name(functions: Callable[[str], RewardFunction]) -> None:
    """Built in, by import path and by file alike."""
    names = ("exact", "echo_tasks.rewards:turn_return", "functions_of_pool.py:lengths")
    entries = attach(names)
    assert functions("lengths").origin == names[2]

    async def run() -> None:
        async with open_pool(*(entry.function for entry in entries)) as pool:
            work = Scorer(
                entries, run_id="demo", limits=ScoringSettings(timeout_s=WAIT_S), metrics=StreamsMetrics(), clock=ManualClock(), pool=pool
            )
            rewards = await work.score(judgeable(1, entry='{"answer": "0"}', turn_rewards=(0.5, 1.0)))
            assert [(reward.name, reward.value) for reward in rewards] == [(names[0], 1.0), (names[1], 1.5), (names[2], 1.0)]

    play(run())


def test_memory_of_a_scoring_process_is_limited(functions: Callable[[str], RewardFunction]) -> None:
    async def run() -> None:
        greedy, mixed = functions("greedy"), functions("mixed")
        async with open_pool(greedy, mixed, memory_mb=1024) as pool:
            answer = await pool.call(greedy, of("all of it"), WAIT_S)
            assert isinstance(answer, Failure)
            assert "MemoryError" in answer.error
            assert await pool.call(mixed, of("1"), WAIT_S) == [Score(1.0)]

    play(run())
