"""Which settings of the topic files a service refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo_ops.cli.main import app
from echo_ops.topic_targets import SERVICES, Service, Target, refusals
from echo_schemas.topic_files import TopicSpec, load_topic_specs

SPECS = load_topic_specs()


def refused(target: Target) -> dict[str, set[str]]:
    return {each.setting: set(each.topics) for each in refusals(SERVICES[target], SPECS)}


def having(setting: str) -> set[str]:
    return {spec.name for spec in SPECS if setting in spec.config}


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        (Target.CONFLUENT_CLOUD, {"compression.type", "min.cleanable.dirty.ratio"}),
        (Target.MSK, {"delete.retention.ms", "min.cleanable.dirty.ratio", "min.insync.replicas", "segment.ms"}),
        (Target.REDPANDA, {"min.insync.replicas"}),
    ],
)
def test_a_setting_that_a_service_does_not_document_is_refused_on_every_topic_that_has_it(target: Target, settings: set[str]) -> None:
    assert refused(target) == {setting: having(setting) for setting in settings}


def test_event_hubs_has_a_limit_of_retention_and_almost_no_settings() -> None:
    found = refused(Target.EVENT_HUBS)
    assert set(found) == {setting for spec in SPECS for setting in spec.config} - {"cleanup.policy", "retention.ms"} | {"retention.ms"}
    assert found["retention.ms"] == {spec.name for spec in SPECS if spec.config.get("retention.ms") == "-1"}


def test_a_limit_names_what_is_above_it_and_what_has_no_end() -> None:
    service = Service(title="A", page="p", at_most={"retention.ms": 5})
    specs = [topic("short", "5"), topic("long", "6"), topic("endless", "-1")]
    (found,) = refusals(service, specs)
    assert (found.setting, found.values, found.topics) == ("retention.ms", ("6", "-1"), ("long", "endless"))
    assert refusals(Service(title="A", page="p"), SPECS) == []


def topic(name: str, retention_ms: str) -> TopicSpec:
    return replace(SPECS[0], name=name, config={"retention.ms": retention_ms})


def test_the_command_names_them_and_asks_no_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ECHO_KAFKA__BOOTSTRAP", "127.0.0.1:1")
    done = CliRunner().invoke(app, ["topics", "check", "--target", "redpanda"])
    assert done.exit_code == 3
    assert "min.insync.replicas" in done.output
    assert SERVICES[Target.REDPANDA].page in done.output.replace("\n", "")
