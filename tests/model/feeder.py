"""A hand that plays the feeder, the workers and the reward processors of an asynchronous run, with all that may go wrong between them."""

from __future__ import annotations

import random

from echo_schemas.records import Drop, Purpose, RolloutRequest, Sampling, WeightManifest, group_id_of
from echo_schemas.topics import DROPS, REQUESTS, WEIGHTS
from tests.model.primitives import SimulatedTime
from tests.model.records import FIRST_WEIGHTS, write_clean, write_doubles, write_ends, write_noisy
from tests.model.runs import ModelRun

_EVERY_S = 0.7
# More than are ever open: the learner's bound evicts some.
_MOST_SEQS = 150


class LateFeeder:
    """Has the last groups answered only when two others are dropped in the log, so that no step takes those drops along."""

    def __init__(self, unrewarded: range, last: range) -> None:
        self._unrewarded = unrewarded
        self._last = last

    def run(self, run: ModelRun) -> None:
        """Until the groups are written."""
        while not {drop.seq for drop in run.read(DROPS, Drop) if drop.what is None} >= set(self._unrewarded):
            run.simulation.block(_EVERY_S, "drops without a step")
        write_clean(run.pipeline, self._last)


class NoisyFeeder:
    """Now and then asks for some groups and has them answered, in asynchronous mode; late, doubled, mixed up, or not at all."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def run(self, run: ModelRun) -> None:
        """Until the simulation ends."""
        while True:
            if run.mode == "asynchronous":
                self._feed(run)
            run.simulation.block(_EVERY_S, "the next groups")

    def _feed(self, run: ModelRun) -> None:
        pipeline, chance = run.pipeline, self._chance
        asked = [record.seq for record in run.read(REQUESTS, RolloutRequest)]
        first = max(asked, default=-1) + 1
        if first > _MOST_SEQS:
            return
        shas = {0: FIRST_WEIGHTS} | {manifest.version: manifest.sha256 for manifest in run.read(WEIGHTS, WeightManifest)}
        version = max(shas)
        seqs = range(first, first + chance.randint(1, 4))
        pipeline.write(REQUESTS, *(_request(seq, version) for seq in seqs))
        if chance.random() < 0.5:
            write_clean(pipeline, seqs, version=version, sha256=shas[version])
        else:
            write_noisy(pipeline, seqs, chance, version=version, sha256=shas[version])
        if chance.random() < 0.3:
            # Late: of a seq that is closed, or still open, or evicted.
            write_doubles(pipeline, chance.randint(0, first))
        if chance.random() < 0.1:
            write_ends(pipeline, 500 + first)


def _request(seq: int, version: int) -> RolloutRequest:
    now_ms = SimulatedTime.time_ns() // 1_000_000
    return RolloutRequest(
        run_id="demo",
        group_id=group_id_of("demo", seq),
        seq=seq,
        purpose=Purpose.TRAIN,
        task="letters",
        prompt_token_ids=b"\x01\x00\x00\x00",
        group_size=2,
        sampling=Sampling(max_new_tokens=2),
        required_version=version,
        learner_version=version,
        issued_ms=now_ms,
        deadline_ms=now_ms + 20_000,
    )
