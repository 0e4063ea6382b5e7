"""A rescore's team without processes: the code that runs in them, called here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

from echo_replay.rescoring.inside import Answers, ScoringTask, Worker, pack_chunk, unpack_answers
from echo_replay.rescoring.team import Item, Judged
from echo_runtime.opening import open_codec
from echo_streams.scoring import Attached
from echo_tasks.rewards import RewardFunction


class InlineTeam:
    """As `Team`; nothing limits a call's time."""

    def __init__(self, task: ScoringTask, function: RewardFunction, num: int) -> None:
        self.num_processes, self.is_async, self.num_replaced, self.stopped = num, False, 0, ""
        self._said = bytearray()
        self._worker = Worker(Attached(name=task.path, function=function), task, open_codec(task.settings), Answers(self._take))

    def __enter__(self) -> InlineTeam:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def judge(self, chunks: Iterator[Sequence[Item]]) -> Iterator[list[Judged]]:
        """Chunk after chunk."""
        with asyncio.Runner() as runner:
            for items in chunks:
                self._worker.work(pack_chunk([(item.where, item.value) for item in items]), runner)
                yield [(items[answer.index], answer) for _, answer in unpack_answers(self._said)]

    def _take(self, data: bytes) -> int:
        self._said += data
        return len(data)
