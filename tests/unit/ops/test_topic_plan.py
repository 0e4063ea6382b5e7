"""Topics as code: what a plan says, for every kind of difference."""

from __future__ import annotations

import dataclasses

import pytest

from echo_ops.topic_plan import Actual, Kind, Plan, make_plan, summarise
from echo_schemas.topic_files import TopicSpec, load_topic_specs

SPECS = {f"ns.{spec.name}": spec for spec in load_topic_specs()}


def actual_of(spec: TopicSpec, **changes: object) -> Actual:
    found = Actual(partitions=spec.partitions, replication_factor=spec.replication_factor, config=spec.config)
    return dataclasses.replace(found, **changes)  # type: ignore[arg-type]


def plan(name: str, *, force: bool = False, **changes: object) -> Plan:
    everything = {physical: actual_of(spec) for physical, spec in SPECS.items()}
    everything[name] = actual_of(SPECS[name], **changes)
    return make_plan(SPECS, everything, num_brokers=3, force=force)


def test_an_empty_cluster_gets_everything() -> None:
    made = make_plan(SPECS, {}, num_brokers=3)
    assert [step.kind for step in made.steps] == [Kind.CREATE] * len(SPECS)
    assert summarise(made) == {"create": len(SPECS)}


def test_a_cluster_as_the_files_say_needs_nothing() -> None:
    made = plan("ns.requests")
    assert made.is_empty
    assert summarise(made) == {}


def test_a_small_cluster_is_measured_by_what_it_can_hold() -> None:
    specs = {name: spec.fitted_to(1) for name, spec in SPECS.items()}
    everything = {name: actual_of(spec) for name, spec in specs.items()}
    assert make_plan(SPECS, everything, num_brokers=1).is_empty


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
