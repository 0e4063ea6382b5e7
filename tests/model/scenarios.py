"""The same run again and again, each time with other faults; without any, it is what the others are compared with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from echo_memory import MemoryCluster
from echo_schemas.records import Coordinates, DropReason
from echo_schemas.topics import TRAJECTORIES
from tests.model.disk import Loss
from tests.model.feeder import LateFeeder, NoisyFeeder
from tests.model.records import member_of, write_clean, write_doubles, write_ends
from tests.model.runs import Fate, Fault, Feeder, ModelRun
from tests.unit.learner.pipeline import GROUP_SIZE

# Calls that change nothing outside: dying before one is dying before the next one that does.
_QUESTIONS = frozenset(
    {
        "poll", "producer_poll", "list_topics", "get_watermark_offsets", "offsets_for_times", "begin_transaction",
        "disk open", "disk scandir", "disk listdir",
    }
)  # fmt: skip


_MODES = ("asynchronous", "sequential")


class Letters:
    """A character is a token below 32."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def encode(self, text: str) -> np.ndarray[Any, np.dtype[np.int32]]:
        """One token a character."""
        return np.array([ord(letter) % 32 for letter in text], np.int32)


class Scenario:
    """A run of kappa + 1 steps: the last one is published out of turn if kappa is not one. `late`: after the
    first one two groups without rewards are dropped, and the next ones' groups come only when that is in the log.
    """

    def __init__(self, folder: Path, mode: str, kappa: int, *, late: bool = False, **sections: Any) -> None:
        self._folder, self._mode, self._kappa, self._sections = folder, mode, kappa, sections
        self.steps = kappa + 1
        self._feeder: Feeder | None = None
        self._records: MemoryCluster | None = None
        with self._new() as run:
            write_clean(run.pipeline, range(2))
            write_doubles(run.pipeline, 0)
            write_ends(run.pipeline, 100)
            first_late = 2 if late else 2 * self.steps
            write_clean(run.pipeline, range(2, first_late))
            write_doubles(run.pipeline, 3 if first_late > 3 else 1)
            if late:
                unrewarded = range(200, 202)
                for seq in unrewarded:
                    run.pipeline.write(TRAJECTORIES, *(member_of(seq, index) for index in range(GROUP_SIZE)))
                self._feeder = LateFeeder(unrewarded, range(first_late, 2 * self.steps))
            self._records = run.pipeline.cluster
        with self._new() as run:
            learner = run.train()
            assert learner.error is None, learner.said
            self.calls: Sequence[str] = tuple(learner.process.calls)
            """Of the learner that nothing befalls, in their order."""
            self._quiet = _outcome(run)

    @property
    def effects(self) -> list[int]:
        """Numbers of the calls that change something outside, from 1."""
        return [number for number, call in enumerate(self.calls, 1) if call not in _QUESTIONS]

    @contextmanager
    def run(self, seed: int | None = None, **what: object) -> Iterator[ModelRun]:
        """A run from the start; an error inside says `what` led to it."""
        try:
            with self._new(seed) as run:
                yield run
        except BaseException as exc:
            exc.add_note(", ".join(f"{name} = {value}" for name, value in {"mode": self._mode, "kappa": self._kappa, **what}.items()))
            raise

    def assert_as_ever(self, run: ModelRun) -> None:
        """In asynchronous mode, where the records are the same ones: the same weights, of the same samples, and the same ends."""
        if self._mode == "asynchronous":
            assert _outcome(run) == self._quiet

    @contextmanager
    def _new(self, seed: int | None = None) -> Iterator[ModelRun]:
        run = ModelRun(
            self._folder, mode=self._mode, kappa=self._kappa, steps=self.steps, seed=seed, records=self._records, **self._sections
        )
        try:
            if self._feeder is not None:
                run.feed(self._feeder)
            yield run
        finally:
            run.close()


def _outcome(run: ModelRun) -> tuple[list[bytes], set[tuple[Coordinates | None, int, DropReason]]]:
    books = run.books()
    weights = [books.blobs[manifest.version, manifest.sha256][:32] for manifest in books.manifests]
    return weights, {(drop.what, drop.seq, drop.why) for drop in books.drops}


Play = Callable[[ModelRun, Fault], None]


def die(run: ModelRun, fault: Fault) -> None:
    """A learner meets the fault, and another one finishes what it began."""
    run.train(fault)
    run.finish()


def sleep(run: ModelRun, fault: Fault) -> None:
    """A learner is paused, another one takes its place and finishes, and then the first wakes up."""
    first = run.train(fault)
    run.finish()
    if first.process.paused:
        run.resume(first)


PLAYS: dict[Fate, Play] = {Fate.KILL: die, Fate.POWER: die, Fate.PAUSE: sleep, Fate.FENCE: die}


def play_at_random(folder: Path, seed: int) -> None:
    """A run of which the seed decides everything: mode, kappa, records, learners, and what befalls each. An error says the seed."""
    chance = random.Random(f"run {seed}")
    mode, kappa = chance.choice(_MODES), chance.randint(1, 4)
    sections: dict[str, Any] = {"staleness": {"budget": chance.choice([3, 9])}, "checkpoint": {"keep": chance.choice([2, 3, 9])}}
    run = ModelRun(folder, mode=mode, kappa=kappa, steps=kappa + chance.randint(1, 3), seed=seed, **sections)
    told: list[str] = []
    try:
        run.feed(NoisyFeeder(chance))
        for _ in range(chance.randint(1, 4)):
            if chance.random() < 0.25:
                mode = chance.choice(_MODES)
            learners = [
                run.start(_any_fault(chance), mode=mode, takeover=chance.random() < 0.6, skew_ms=chance.choice([0, 0, -90_000, 90_000]))
                for _ in range(chance.choice([1, 1, 2]))
            ]
            told += [f"{learner.process.name} ({mode}): {learner.fault}" for learner in learners]
            for learner in learners:
                run.wait(learner)
            run.check()
            if chance.random() < 0.4:
                told.append("all wake up")
                run.wake_all()
        run.finish(chance.choice(_MODES))
        run.wake_all()
        run.finish()
    except BaseException as exc:
        exc.add_note(f"ECHO_MODEL_SEED={seed}: kappa {kappa}, {sections}; " + "; ".join(told))
        raise
    finally:
        run.close()


def _any_fault(chance: random.Random) -> Fault | None:
    fate = chance.choice([Fate.KILL, Fate.POWER, Fate.PAUSE, Fate.PAUSE, Fate.FENCE, None])
    return None if fate is None else Fault(fate, chance.randint(1, 500), chance.choice(list(Loss)), chance.randrange(1 << 30))
