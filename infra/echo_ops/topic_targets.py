"""Topic settings that Kafka services refuse: the topic files compared with each service's documentation, read in November 2026. Pure.

For a service that is not here, `topics apply` says what it refuses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum

from echo_schemas.topic_files import TopicSpec

_DAY_MS = 86_400_000
_COMMON = frozenset({"cleanup.policy", "max.message.bytes", "message.timestamp.type", "retention.bytes", "retention.ms"})
_COMPACTION = frozenset({"delete.retention.ms", "max.compaction.lag.ms", "min.compaction.lag.ms", "segment.bytes", "segment.ms"})


class Target(StrEnum):
    """A service with an interface like Kafka's."""

    CONFLUENT_CLOUD = "confluent-cloud"
    MSK = "msk"
    REDPANDA = "redpanda"
    EVENT_HUBS = "event-hubs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a service documents. `settable`: topic settings that a client may set; None: all of Kafka's. `at_most`: the largest value of a
    setting. `notes`: other differences. `page`: the documentation.
    """

    title: str
    page: str
    settable: Set[str] | None = None
    at_most: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A setting of the topic files that the service does not take, and on which topics."""

    setting: str
    values: tuple[str, ...]
    topics: tuple[str, ...]
    why: str


SERVICES: Mapping[Target, Service] = {
    Target.CONFLUENT_CLOUD: Service(
        title="Confluent Cloud",
        page="https://docs.confluent.io/cloud/current/topics/manage.html",
        settable=_COMMON | _COMPACTION | {"min.insync.replicas"},
        notes=("It chooses when to compact, so compacted topics are longer and a start reads a little more.",),
    ),
    Target.MSK: Service(
        title="Amazon MSK Serverless",
        page="https://docs.aws.amazon.com/msk/latest/developerguide/serverless-config.html",
        settable=_COMMON | {"compression.type"},
        notes=(
            "Clusters with brokers of their own (Standard) are Apache Kafka: they take all of it.",
            "A login with IAM needs a token that librdkafka fetches by OAUTHBEARER; the reward application's client has no such login.",
        ),
    ),
    Target.REDPANDA: Service(
        title="Redpanda",
        page="https://docs.redpanda.com/streaming/current/reference/properties/topic-properties/",
        settable=_COMMON | _COMPACTION | {"compression.type", "min.cleanable.dirty.ratio"},
        notes=("acks=all means a majority of the replicas there: two of three, as min.insync.replicas requires.",),
    ),
    Target.EVENT_HUBS: Service(
        title="Azure Event Hubs",
        page="https://learn.microsoft.com/azure/event-hubs/apache-kafka-configurations",
        settable=frozenset({"cleanup.policy", "retention.ms"}),
        at_most={"retention.ms": 90 * _DAY_MS},
        notes=(
            "Make the topics in the portal or by its API: Kafka's admin client sets nothing there.",
            "Transactions are in the tiers Premium and Dedicated, as a preview; without them no learner and no feeder starts.",
            "Of compressions it takes gzip alone: [kafka.client] \"compression.type\" = \"gzip\".",
        ),
    ),
}  # fmt: skip


def refusals(service: Service, specs: Iterable[TopicSpec]) -> list[Refusal]:
    """Settings of `specs` that `service` does not take, by name."""
    found: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for spec in specs:
        for setting, value in spec.config.items():
            most = service.at_most.get(setting)
            if service.settable is not None and setting not in service.settable:
                found[setting, "cannot be set there"][value].append(spec.name)
            elif most is not None and (int(value) > most or int(value) < 0):
                found[setting, f"is at most {most} there"][value].append(spec.name)
    return [
        Refusal(setting=setting, values=tuple(by_value), topics=tuple(name for names in by_value.values() for name in names), why=why)
        for (setting, why), by_value in sorted(found.items())
    ]
