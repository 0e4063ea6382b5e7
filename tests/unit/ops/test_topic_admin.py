"""Topics that were made are told of before anybody asks for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from echo_bus.errors import DeadlineExceeded
from echo_memory import MemoryCluster
from echo_ops import topic_admin
from echo_ops.supervisor.registration import make_topics
from echo_ops.topic_admin import TopicAdmin
from echo_schemas.naming import Namespace
from echo_schemas.topics import EVALS, TRAJECTORIES

SPACE = Namespace("unit.topics")


class HesitantCluster(MemoryCluster):
    """Its brokers tell of a topic only after they were asked so many times; `leaderless`: of its partitions, but not who leads them."""

    def __init__(self, silences: int, *, leaderless: bool = False) -> None:
        super().__init__()
        self.silences = silences
        self._leaderless = leaderless

    def admin(self) -> Any:
        inner = super().admin()
        list_topics = inner.list_topics

        def tell(*arguments: Any, **options: Any) -> Any:
            known = list_topics(*arguments, **options)
            if not known.topics or not self.silences:
                return known
            self.silences -= 1
            nobody = SimpleNamespace(leader=-1)
            told = {
                name: SimpleNamespace(partitions=dict.fromkeys(topic.partitions, nobody))
                for name, topic in known.topics.items()
                if self._leaderless
            }
            return SimpleNamespace(topics=told, brokers=known.brokers)

        inner.list_topics = tell  # type: ignore[method-assign]
        return inner


class Answering(MemoryCluster):
    """Says that it is there, as a real one does."""

    def check(self, timeout_s: float) -> int:
        del timeout_s
        return 1


@pytest.mark.parametrize("leaderless", [False, True])
def test_topics_that_were_made_are_there_when_apply_returns(leaderless: bool) -> None:
    cluster = HesitantCluster(3, leaderless=leaderless)
    topics = TopicAdmin(cluster, SPACE)
    topics.apply(topics.plan())
    assert cluster.silences == 0
    assert topics.plan().is_empty


def test_topics_that_nobody_tells_of_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_admin, "_TOLD_S", 0.0)
    topics = TopicAdmin(HesitantCluster(1_000), SPACE)
    plan = topics.plan()
    with pytest.raises(DeadlineExceeded, match=r"topics, 'unit\.topics\..*' for one, have partitions whose leader no broker names"):
        topics.apply(plan)


def test_a_start_makes_what_is_missing_and_changes_nothing_else() -> None:
    cluster = Answering()
    assert make_topics(cluster, SPACE) == ""  # type: ignore[arg-type]  # all of a real cluster that it needs
    retention = ConfigEntry("retention.ms", "1000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, SPACE.topic(TRAJECTORIES), incremental_configs=[retention])
    for changed in cluster.admin().incremental_alter_configs([resource]).values():
        changed.result()
    for deleted in cluster.admin().delete_topics([SPACE.topic(EVALS)]).values():
        deleted.result()
    said = make_topics(cluster, SPACE)  # type: ignore[arg-type]
    assert said == "1 topics differ from their files; `echoswarm topics plan` shows how"
    (step,) = TopicAdmin(cluster, SPACE).plan().steps
    assert (step.topic, step.what, step.before) == (SPACE.topic(TRAJECTORIES), "retention.ms", "1000")
