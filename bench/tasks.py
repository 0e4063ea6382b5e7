"""The cost of judging an answer: mathematics, plain and in LaTeX; a hostile answer; puzzles; Sokoban's boards and turns.

    python bench/tasks.py [--answers N] [--json FILE]

Rates are per second of processor time, so that other load on the machine does not count. `hostile_extra_s` is wall time: the time that each
hostile answer adds to a pool of one scoring process, which judges the same good answers with and without them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from command import parser_of, save
from sokoban import measure as measure_sokoban

from echo_schemas.records import FinishReason
from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import ScoringPool
from echo_streams.values import Score
from echo_tasks.catalogue import load_reward, load_task
from echo_tasks.rewards import RewardFunction, ScoredSample

# ECHO-2's number of samples per prompt.
GROUP_SIZE = 16
HOSTILE = (
    "9^{9^{9^{9}}}",
    "10000000!",
    "\\sum_{n=1}^{10000000} n^n",
    "\\int_0^\\infty e^{x^x} dx",
    "\\prod_{i=1}^{100000} (x+i)",
    "(x+1)^{100000}",
)
_THOUGHTS = "Let us think step by step. First we add, then we multiply. " * 8
# So long that a busy machine kills no call.
_LIMIT_S = 120.0


def sample(completion: str, entry: Any) -> ScoredSample:
    """A completion after some thoughts, as reward functions get it."""
    return ScoredSample(
        prompt="?",
        completion=_THOUGHTS + completion,
        entry=entry,
        token_ids=np.zeros(2, np.int32),
        num_generated=1,
        turn_rewards=(),
        finish_reason=FinishReason.STOP,
        metadata={},
        task="bench",
    )


def numbers(count: int) -> list[ScoredSample]:
    """Answers such as GSM8K's and AIME's: whole numbers, each second one right."""
    groups = [number // GROUP_SIZE for number in range(count)]
    return [sample(f"\\boxed{{{1_000 + group + number % 2}}}", {"answer": f"{1_000 + group:,}"}) for number, group in enumerate(groups)]


def distinct_formulas(count: int) -> list[ScoredSample]:
    """Formulas that all differ."""
    return [sample(f"\\boxed{{\\sqrt{{12}}+{number}}}", {"answer": f"2\\sqrt{{3}} + {number}"}) for number in range(count)]


def formulas(count: int) -> list[ScoredSample]:
    """Answers such as MATH's: formulas in another form than the reference, six in ten right."""
    groups = [number // GROUP_SIZE for number in range(count)]
    return [
        sample(
            f"\\boxed{{\\sqrt{{{2 + number % 5}}}+\\frac{{{2 * group + 6}}}{{{14}}}}}",
            {"answer": f"\\frac{{{group + 3}}}{{7}} + \\sqrt{{2}}"},
        )
        if number % 2
        else sample(f"\\boxed{{\\frac{{{2 * group + 2}}}{{6}}}}", {"answer": f"\\frac{{{group + 1}}}{{3}}"})
        for number, group in enumerate(groups)
    ]


def per_second(call: Callable[[ScoredSample], Any], samples: Sequence[ScoredSample]) -> float:
    """Calls per second of processor time, after one call that fills caches."""
    call(samples[0])
    started_s = time.process_time()
    for one in samples:
        call(one)
    return len(samples) / (time.process_time() - started_s)


def puzzles(name: str, count: int) -> dict[str, float]:
    """Prompts made and reference answers judged per second."""
    task, judge = load_task(name), load_reward(name)
    task.prompt(0, 0)
    started_s = time.process_time()
    entries = [task.prompt(0, seq).entry for seq in range(count)]
    made_s = time.process_time() - started_s
    samples = [sample(f"<answer>{entry['answer']}</answer>", entry) for entry in entries]
    key = name.replace("-", "_")
    return {f"{key}_prompts_per_s": count / made_s, f"{key}_answers_per_s": per_second(judge, samples)}


async def judged(pool: ScoringPool, function: RewardFunction, samples: Iterable[ScoredSample]) -> tuple[float, float]:
    """The wall time and the sum of the values of samples, one after another."""
    started_s, total = time.perf_counter(), 0.0
    for one in samples:
        answer = await pool.call(function, one, _LIMIT_S)
        if not isinstance(answer, list):
            sys.exit(f"the pool gave no score: {answer.error}")
        score: Score = answer[0]
        total += score.value
    return time.perf_counter() - started_s, total


async def hostile_cost(good: Sequence[ScoredSample]) -> dict[str, float]:
    """The cost of hostile answers between good ones. Checks that the good ones keep their values."""
    function, metrics = load_reward("math"), StreamsMetrics()
    pool = ScoringPool([function], num_processes=1, metrics=metrics)
    await pool.start()
    try:
        await judged(pool, function, good)
        alone_s, alone = await judged(pool, function, good)
        step = len(good) // len(HOSTILE)
        mixed = [
            one
            for number, answer in enumerate(HOSTILE)
            for one in (sample(f"\\boxed{{{answer}}}", {"answer": "42"}), *good[number * step : (number + 1) * step])
        ] + list(good[len(HOSTILE) * step :])
        mixed_s, total = await judged(pool, function, mixed)
    finally:
        pool.close()
    if total != alone:
        sys.exit(f"good answers scored {alone} alone and {total} between hostile ones")
    restarts = metrics.registry.get_sample_value("echo_streams_pool_restarts_total", {"reason": "hung"}) or 0.0
    return {
        "hostile_extra_s": (mixed_s - alone_s) / len(HOSTILE),
        "hostile_processes_killed": restarts,
        "pool_answers_per_s": len(good) / alone_s,
    }


def main() -> None:
    """Measure, print and save."""
    parser = parser_of(__doc__)
    parser.add_argument("--answers", type=int, default=2_000)
    arguments = parser.parse_args()
    judge = load_reward("math")
    plain, latex = per_second(judge, numbers(arguments.answers)), per_second(judge, formulas(arguments.answers))
    found = {
        # Half of each: the mean of times, not of rates.
        "math_answers_per_s": 2 / (1 / plain + 1 / latex),
        "math_numbers_per_s": plain,
        "math_formulas_per_s": latex,
        "math_distinct_formulas_per_s": per_second(judge, distinct_formulas(arguments.answers // 4)),
        **asyncio.run(hostile_cost(numbers(200) + formulas(200))),
        **puzzles("knights-knaves", 300),
        **puzzles("countdown", 300),
        **{f"sokoban_{name}": value for name, value in measure_sokoban().items()},
        "load": os.getloadavg()[0],
    }
    figures = {name: round(value, 3) for name, value in found.items()}
    print(json.dumps(figures, indent=2))
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
