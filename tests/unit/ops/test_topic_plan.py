"""Topics as code: what a plan says, for every kind of difference."""

from __future__ import annotations

import dataclasses

import pytest

from echo_ops.topic_plan import ExistingTopic, Kind, Plan, choose_replicas, make_plan, summarise
from echo_schemas.errors import UserError
from echo_schemas.topic_files import TopicSpec, load_topic_specs

SPECS = {f"ns.{spec.name}": spec for spec in load_topic_specs()}


def actual_of(spec: TopicSpec, **changes: object) -> ExistingTopic:
    found = ExistingTopic(partitions=spec.partitions, replication_factor=spec.replication_factor, config=spec.config)
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def plan(name: str, *, force: bool = False, lowers: bool = False, **changes: object) -> Plan:
    everything = {physical: actual_of(spec) for physical, spec in SPECS.items()}
    everything[name] = actual_of(SPECS[name], **changes)
    return make_plan(SPECS, everything, replicas=3, num_brokers=3, force=force, lowers=lowers)


def test_an_empty_cluster_gets_everything() -> None:
    made = make_plan(SPECS, {}, replicas=3, num_brokers=3)
    assert [step.kind for step in made.steps] == [Kind.CREATE] * len(SPECS)
    assert summarise(made) == {"create": len(SPECS)}


def test_a_cluster_as_the_files_say_needs_nothing() -> None:
    made = plan("ns.requests")
    assert made.is_empty
    assert summarise(made) == {}


def namespace_of(replicas: int) -> dict[str, ExistingTopic]:
    """What the cluster has of a namespace that was made with so many replicas."""
    return {name: actual_of(spec.fitted_to(replicas)) for name, spec in SPECS.items()}


def chosen(actual: dict[str, ExistingTopic], *, num_brokers: int, num_addresses: int = 1, asked: int | None = None) -> int:
    return choose_replicas(SPECS, actual, num_brokers=num_brokers, num_addresses=num_addresses, asked=asked)


@pytest.mark.parametrize(("num_brokers", "replicas"), [(1, 1), (3, 3), (5, 3)])
def test_a_new_namespace_is_fitted_to_the_cluster(num_brokers: int, replicas: int) -> None:
    assert chosen({}, num_brokers=num_brokers) == replicas


@pytest.mark.parametrize(("num_brokers", "num_addresses"), [(2, 1), (2, 3), (1, 3)])
def test_a_new_namespace_is_not_fitted_to_what_happens_to_answer(num_brokers: int, num_addresses: int) -> None:
    with pytest.raises(UserError, match=f"{num_brokers} brokers answer, and the topics want 3 replicas") as refused:
        chosen({}, num_brokers=num_brokers, num_addresses=num_addresses)
    assert f"replicas = {num_brokers}" in refused.value.hint
    assert chosen({}, num_brokers=num_brokers, num_addresses=num_addresses, asked=num_brokers) == num_brokers


@pytest.mark.parametrize("made_with", [1, 2, 3])
@pytest.mark.parametrize("num_brokers", [1, 2, 3])
def test_a_broker_that_is_away_changes_nothing_about_what_should_be(made_with: int, num_brokers: int) -> None:
    actual = namespace_of(made_with)
    replicas = chosen(actual, num_brokers=num_brokers, num_addresses=3)
    assert make_plan(SPECS, actual, replicas=replicas, num_brokers=num_brokers).is_empty


def test_a_topic_that_is_missing_waits_for_the_brokers_that_are_away() -> None:
    actual = namespace_of(3)
    del actual["ns.evals"]
    made = make_plan(SPECS, actual, replicas=chosen(actual, num_brokers=2), num_brokers=2)
    (step,) = made.unmakeable
    assert (step.topic, step.kind) == ("ns.evals", Kind.REFUSED)
    assert "2 answer" in step.why
    assert make_plan(SPECS, actual, replicas=3, num_brokers=3).only(Kind.CREATE).steps[0].topic == "ns.evals"


def test_durability_is_lowered_only_for_a_reason() -> None:
    config = {**SPECS["ns.steps"].config, "min.insync.replicas": "3"}
    for force in (False, True):
        (step,) = plan("ns.steps", force=force, config=config).steps
        assert (step.kind, step.before, step.after) == (Kind.REFUSED, "3", "2")
        assert "--reason" in step.why
    (step,) = plan("ns.steps", force=True, lowers=True, config=config).steps
    assert step.kind is Kind.SETTING


def test_durability_is_raised_without_a_word() -> None:
    (step,) = plan("ns.steps", config={**SPECS["ns.steps"].config, "min.insync.replicas": "1"}).steps
    assert (step.kind, step.after) == (Kind.SETTING, "2")


def test_settings_that_differ_are_changed_and_others_left_alone() -> None:
    config = {**SPECS["ns.trajectories"].config, "retention.ms": "1000", "segment.ms": "3600000"}
    (step,) = plan("ns.trajectories", config=config).steps
    assert (step.kind, step.what, step.before, step.after) == (Kind.SETTING, "retention.ms", "1000", "604800000")


def test_a_setting_that_nobody_set_shows_as_default() -> None:
    config = {key: value for key, value in SPECS["ns.trajectories"].config.items() if key != "retention.bytes"}
    (step,) = plan("ns.trajectories", config=config).steps
    assert step.before == "default"


def test_a_topic_never_shrinks() -> None:
    for force in (False, True):
        (step,) = plan("ns.requests", force=force, partitions=64).steps
        assert step.kind is Kind.REFUSED
        assert "cannot remove partitions" in step.why


def test_a_keyed_topic_grows_only_by_force() -> None:
    assert plan("ns.trajectories", partitions=4).refused[0].why.endswith("use --force")
    assert plan("ns.trajectories", partitions=4, force=True).steps[0].kind is Kind.GROW
    assert plan("ns.requests", partitions=4).steps[0].kind is Kind.GROW


def test_replicas_are_a_task_for_the_clusters_operators() -> None:
    (step,) = plan("ns.runs", replication_factor=1).steps
    assert step.kind is Kind.REFUSED
    assert "kafka-reassign-partitions" in step.why


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.topic is not None and spec.topic.key is None])
def test_only_topics_whose_key_decides_the_partition_are_keyed(name: str) -> None:
    assert not SPECS[name].keyed
