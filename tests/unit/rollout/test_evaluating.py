"""A worker asked for exactly one version: the newest, one it has passed, one that is gone."""

from __future__ import annotations

from typing import Any

from echo_rollout.engines.scripted import ScriptedEngine
from echo_schemas.records import Purpose, RolloutRequest
from echo_tasks.task import Environment, Observation, Turn
from tests.unit.rollout.conftest import MakeSwarm
from tests.unit.rollout.swarm import LetterTask, Swarm, wait_until


def ask(swarm: Swarm, seq: int, version: int, **changes: Any) -> RolloutRequest:
    request = swarm.request(seq, purpose=Purpose.EVAL, required_version=version, exact=True, evaluation="held-out", **changes)
    swarm.ask(request)
    return request


def answers(swarm: Swarm, request: RolloutRequest) -> list[Any]:
    found: list[Any] = wait_until(lambda: swarm.groups().get(request.group_id), f"answers to {request.group_id}")
    return found


def test_an_evaluation_is_answered_under_the_version_it_names_though_a_newer_one_is_installed(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    older = swarm.publish_version(0)
    swarm.publish_version(1)
    newest = swarm.publish_version(2)
    swarm.start_worker(ScriptedEngine())
    wait_until(lambda: swarm.metric("echo_rollout_installed_version") == 2, "version 2 to be installed")
    found = {version: answers(swarm, ask(swarm, version, version)) for version in (0, 2)}
    for version, manifest in ((0, older), (2, newest)):
        assert [(each.min_version, each.max_version) for each in found[version]] == [(version, version)] * 2
        assert {each.weights_sha256 for each in found[version]} == {manifest.sha256}
        assert {each.metadata["evaluation"] for each in found[version]} == {"held-out"}
    assert {status.installed_version for status in swarm.statuses()} <= {None, 2}, "no heartbeat tells of the older one"
    swarm.ask(swarm.request(7))
    wait_until(lambda: swarm.groups().get("demo/7"), "a training group")
    assert {each.min_version for each in swarm.groups()["demo/7"]} == {2}


def test_an_evaluation_of_weights_that_are_gone_is_closed_and_training_goes_on(make_swarm: MakeSwarm) -> None:
    swarm = make_swarm()
    swarm.publish_version(0, promise="0" * 64)
    swarm.publish_version(1)
    swarm.start_worker(ScriptedEngine())
    ask(swarm, 1, 0)
    wait_until(lambda: swarm.metric("echo_rollout_groups_total", outcome="superseded") == 1, "the request to be closed")
    swarm.ask(swarm.request(2))
    wait_until(lambda: swarm.groups().get("demo/2"), "a training group")
    assert "demo/eval-1" not in swarm.groups()


def test_an_evaluation_asks_the_task_of_its_section(make_swarm: MakeSwarm) -> None:
    """The run's own task has no environment; the evaluation's answers every action with its own words."""
    swarm = make_swarm()
    swarm.publish_version(0)
    swarm.evaluation_tasks = {"held-out": _Echoing()}
    swarm.start_worker(ScriptedEngine())
    members = answers(swarm, ask(swarm, 0, 0))
    assert all(each.turn_rewards == (0.5,) for each in members)


class _Echoing(LetterTask):
    """One turn, worth a half."""

    def environment(self, entry: Any) -> Environment | None:
        return _Episode()


class _Episode:
    def reset(self) -> Observation:
        return Observation(text="")

    def step(self, action: str) -> Turn:
        return Turn(observation="", reward=0.5, done=True)
