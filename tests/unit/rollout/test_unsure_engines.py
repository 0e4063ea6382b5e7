"""Engines that do not know all that a run wants to know, and servers whose answers are none: refused, passed on marked, or counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from echo_rollout.engines.engine import AnswerUnusable, Generation
from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.errors import UserError
from echo_schemas.records import LogprobSource, Sampling
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import wait_until
from tests.unit.rollout.test_swarm import GuessingTask


class UnsaidEngine(ScriptedEngine):
    """Cannot say how likely its tokens were."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, logprobs=LogprobSource.RECOMPUTED)

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        found = await super().generate(prompt, n, sampling)
        return [replace(each, logprobs=np.zeros_like(each.logprobs), logprob_source=LogprobSource.RECOMPUTED) for each in found]


class UnprovedEngine(ScriptedEngine):
    """Believes what it is told about its version."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = replace(self.capabilities, proves_version=False)


@pytest.mark.parametrize(
    ("engine", "sentence"), [(UnsaidEngine, "gives no log-probabilities"), (UnprovedEngine, "cannot prove which version")]
)  # fmt: skip
def test_a_worker_with_such_an_engine_does_not_start(make_swarm: MakeSwarm, engine: type[ScriptedEngine], sentence: str) -> None:
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.ask(swarm.request(0))
    worker = swarm.start_worker(engine())
    wait_until(lambda: not worker.is_alive, "the worker to end")
    assert isinstance(worker.error, UserError)
    assert sentence in str(worker.error)
    assert not swarm.trajectories()


@pytest.mark.parametrize("with_turns", [False, True])
def test_where_the_run_allows_it_trajectories_say_that_nobody_said(make_swarm: MakeSwarm, with_turns: bool) -> None:
    swarm = make_swarm(rollout={"missing_logprobs": "recompute"})
    swarm.publish_version(0)
    swarm.ask(swarm.request(0, sampling=Sampling(max_new_tokens=8)))
    swarm.start_worker(UnsaidEngine(), task=GuessingTask() if with_turns else None)
    wait_until(lambda: len(swarm.trajectories()) == 2, "two trajectories")
    for record in swarm.trajectories():
        assert record.logprob_source is LogprobSource.RECOMPUTED
        assert not record.logprob_values.any()
    assert swarm.statuses()[-1].capabilities["logprobs"] == "recomputed"


def test_an_engine_that_claims_its_version_says_so_where_it_is_allowed(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"unproved_versions": "allow"})
    swarm.publish_version(0)
    swarm.ask(swarm.request(0))
    swarm.start_worker(UnprovedEngine())
    wait_until(lambda: len(swarm.trajectories()) == 2, "two trajectories")
    assert swarm.statuses()[-1].capabilities["version"] == "claimed"
    assert all(record.logprob_source is LogprobSource.SAMPLER for record in swarm.trajectories())


class HalfAnswering(ScriptedEngine):
    """Every other answer is none."""

    def __init__(self) -> None:
        super().__init__()
        self.num_asked = 0

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        self.num_asked += 1
        if self.num_asked % 2:
            raise AnswerUnusable("The server returned 1 choices, and 2 were asked for.")
        return await super().generate(prompt, n, sampling)


def test_an_unusable_answer_costs_its_group_and_not_the_worker(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"groups_in_flight": 1})
    swarm.publish_version(0)
    swarm.ask(swarm.request(0), swarm.request(1))
    worker = swarm.start_worker(HalfAnswering())
    wait_until(lambda: swarm.metric("echo_rollout_groups_failed_total", reason="unusable") == 1, "the group to be given up")
    wait_until(lambda: len(swarm.trajectories()) == 2, "the other group")
    assert worker.is_alive


class MiscountingEngine(ScriptedEngine):
    """One completion too few, then one too many, then as many as were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.errors = [-1, 1]

    async def generate(self, prompt: Sequence[int], n: int, sampling: Sampling) -> list[Generation]:
        return await super().generate(prompt, n + (self.errors.pop(0) if self.errors else 0), sampling)


def test_completions_that_are_not_as_many_as_were_asked_for_cost_their_group_at_once(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm(rollout={"groups_in_flight": 1})
    swarm.publish_version(0)
    swarm.ask(*(swarm.request(seq) for seq in range(3)))
    worker = swarm.start_worker(MiscountingEngine())
    wait_until(lambda: swarm.metric("echo_rollout_groups_failed_total", reason="invalid") == 2, "both groups to be given up")
    wait_until(lambda: len(swarm.trajectories()) == 2, "the third group")
    assert worker.is_alive
