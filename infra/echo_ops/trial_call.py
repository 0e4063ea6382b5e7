"""One call of a reward before anything runs: does it give a score?"""

from __future__ import annotations

import asyncio
import threading

from echo_streams.metrics import StreamsMetrics
from echo_streams.pool import CallTimedOut, Failure, ProcessDied, ScoringPool
from echo_streams.values import score_of, scores_of
from echo_tasks.rewards import RewardFunction, RewardKind, ScoredSample

_CALL_S = 3.0


def why_no_score(function: RewardFunction, sample: ScoredSample) -> str:
    """Why a call gave no score; empty if it gave one. A call that hangs stays in its thread, which does not hold up the command."""
    if function.isolated:
        return asyncio.run(_in_process(function, sample))
    told: list[str] = []

    def call() -> None:
        try:
            if function.kind is RewardKind.BATCH:
                scores_of(function.call([sample]), 1)
            else:
                returned = function.call(sample)
                score_of(asyncio.run(returned) if function.kind is RewardKind.ASYNC else returned)
        except BaseException as exc:  # a reward is the user's code and may raise anything
            told.append(f"raised {type(exc).__name__}: {exc}")
        else:
            told.append("")

    thread = threading.Thread(target=call, name=f"reward {function.name}", daemon=True)
    thread.start()
    thread.join(_CALL_S)
    return told[0] if told else f"did not answer within {_CALL_S:g} s."


async def _in_process(function: RewardFunction, sample: ScoredSample) -> str:
    """As `why_no_score`, in a scoring process."""
    pool = ScoringPool([function], num_processes=1, metrics=StreamsMetrics())
    timeout_s = function.timeout_s or _CALL_S
    try:
        await pool.start()
        found = await pool.call(function, [sample] if function.kind is RewardKind.BATCH else sample, timeout_s)
    except CallTimedOut:
        return f"did not answer within {timeout_s:g} s."
    except ProcessDied:
        return "ended its scoring process."
    finally:
        pool.close(waits=True)
    return f"gave no score: {found.error}" if isinstance(found, Failure) else ""
