"""What Kafka services let nobody set: the topic files compared with each service's documentation, read in November 2026. Pure.

A service that is not here is asked by trying: `topics apply` says what it refuses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from echo_schemas.topic_files import TopicSpec

_DAY_MS = 86_400_000


class Target(StrEnum):
    """A service with an interface like Kafka's."""

    CONFLUENT_CLOUD = "confluent-cloud"
    MSK = "msk"
    REDPANDA = "redpanda"
    EVENT_HUBS = "event-hubs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What a service documents. `settable`: topic settings that a client may set; None: all of Kafka's. `at_most`: the largest value of a
    setting. `notes`: what else a run meets there. `page`: where it says so.
    """

    title: str
    page: str
    settable: frozenset[str] | None = None
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
        settable=frozenset(
            {
                "cleanup.policy",
                "delete.retention.ms",
                "max.compaction.lag.ms",
                "max.message.bytes",
                "message.timestamp.type",
                "min.compaction.lag.ms",
                "min.insync.replicas",
                "retention.bytes",
                "retention.ms",
                "segment.bytes",
                "segment.ms",
            }
        ),
        notes=("It compacts when it wants to, so compacted topics are longer and a start reads a little more.",),
    ),
    Target.MSK: Service(
        title="Amazon MSK Serverless",
        page="https://docs.aws.amazon.com/msk/latest/developerguide/serverless-config.html",
        settable=frozenset(
            {"cleanup.policy", "compression.type", "max.message.bytes", "message.timestamp.type", "retention.bytes", "retention.ms"}
        ),
        notes=(
            "Clusters with brokers of their own (Standard) are Apache Kafka: they take all of it.",
            "Who logs in with IAM needs a token that librdkafka fetches by OAUTHBEARER; the reward application's client has no such login.",
        ),
    ),
    Target.REDPANDA: Service(
        title="Redpanda",
        page="https://docs.redpanda.com/streaming/current/reference/properties/topic-properties/",
        settable=frozenset(
            {
                "cleanup.policy",
                "compression.type",
                "delete.retention.ms",
                "max.compaction.lag.ms",
                "max.message.bytes",
                "message.timestamp.type",
                "min.cleanable.dirty.ratio",
                "min.compaction.lag.ms",
                "retention.bytes",
                "retention.ms",
                "segment.bytes",
                "segment.ms",
            }
        ),
        notes=("acks=all means a majority of the replicas there, which of three is the two that min.insync.replicas asks for.",),
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
