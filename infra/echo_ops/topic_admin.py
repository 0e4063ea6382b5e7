"""Reads the topics of a cluster, and does the steps of a plan."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, NewTopic, ResourceType

from echo_bus.client.cluster import Cluster
from echo_bus.client.kafka_errors import translated
from echo_bus.clock import Deadline
from echo_bus.errors import DeadlineExceeded
from echo_ops.topic_plan import ExistingTopic, Kind, Plan, choose_replicas, make_plan
from echo_schemas.naming import Namespace
from echo_schemas.topic_files import TopicSpec, load_topic_specs

_TIMEOUT_S = 15.0
# How long brokers may take to know the topics that the controller has made.
_TOLD_S = 60.0
_ASK_AGAIN_S = 0.05


class TopicAdmin:
    """Plans and applies the topics of one namespace."""

    def __init__(self, cluster: Cluster, namespace: Namespace, *, replicas: int | None = None) -> None:
        """`replicas`: of [kafka] replicas; see `choose_replicas`."""
        self._admin = cluster.admin()
        self._namespace = namespace
        self._replicas = replicas
        self._num_addresses = len(getattr(cluster, "bootstrap", "").split(","))

    def wanted(self) -> dict[str, TopicSpec]:
        """Physical name → topic, from the files."""
        return {f"{self._namespace.name}.{spec.name}": spec for spec in load_topic_specs()}

    def plan(self, *, force: bool = False, lowers: bool = False) -> Plan:
        """The differences between files and cluster; see `make_plan`. Raises UserError if too few brokers answer to make the namespace,
        TransportError.
        """
        metadata = self._ask(lambda: self._admin.list_topics(timeout=_TIMEOUT_S))
        wanted = self.wanted()
        existing = [name for name in wanted if name in metadata.topics]
        configs = self._configs(existing)
        actual = {
            name: ExistingTopic(
                partitions=len(metadata.topics[name].partitions),
                replication_factor=min((len(part.replicas) for part in metadata.topics[name].partitions.values()), default=0),
                config=configs[name],
            )
            for name in existing
        }
        num_brokers = len(metadata.brokers)
        replicas = choose_replicas(
            wanted, actual, num_brokers=num_brokers, num_addresses=self._num_addresses, asked=self._replicas
        )  # fmt: skip
        return make_plan(wanted, actual, replicas=replicas, num_brokers=num_brokers, force=force, lowers=lowers)

    def wait_usable(self, names: Iterable[str]) -> None:
        """Wait until every partition of the topics `names` has a leader. Raises DeadlineExceeded, TransportError."""
        self._wait_told(dict.fromkeys(names, 1))

    def short_of_replicas(self) -> int:
        """How many partitions of the namespace have a replica that is not in sync: its broker is down, or behind."""
        topics = self._topics()
        partitions = [part for name in self.wanted() if name in topics for part in topics[name].partitions.values()]
        return sum(len(part.isrs) < len(part.replicas) for part in partitions)

    def existing(self) -> list[str]:
        """Topics of the files that the cluster has."""
        return sorted(self.wanted().keys() & self._topics().keys())

    def strangers(self) -> list[str]:
        """Topics below the namespace that no file describes."""
        return sorted(name for name in self._topics().keys() - self.wanted().keys() if name.startswith(f"{self._namespace.name}."))

    def apply(self, plan: Plan) -> None:
        """Do every step that is not refused, and wait until the brokers know the new topics.

        Raises TransportError at the first step that the cluster refuses; the next apply goes on there. DeadlineExceeded.
        """
        created = [step.topic for step in plan.steps if step.kind is Kind.CREATE]
        if created:
            self._done(self._admin.create_topics([_new_topic(name, plan.specs[name]) for name in created], request_timeout=_TIMEOUT_S))
        grown = [NewPartitions(step.topic, int(step.after)) for step in plan.steps if step.kind is Kind.GROW]
        if grown:
            self._done(self._admin.create_partitions(grown, request_timeout=_TIMEOUT_S))
        self._wait_told({name: plan.specs[name].partitions for name in created} | {grow.topic: grow.new_total_count for grow in grown})
        changes = defaultdict(list)
        for step in plan.only(Kind.SETTING).steps:
            changes[step.topic].append(ConfigEntry(step.what, step.after, incremental_operation=AlterConfigOpType.SET))
        if changes:
            resources = [ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries) for name, entries in changes.items()]
            self._done(self._admin.incremental_alter_configs(resources, request_timeout=_TIMEOUT_S))

    def _wait_told(self, counts: Mapping[str, int]) -> None:
        """Wait until the brokers know every topic with so many partitions, each with a leader: the controller knows them earlier."""
        deadline = Deadline.after(_TOLD_S)
        while counts:
            known = self._topics()
            untold = [name for name, count in counts.items() if not _is_led(known.get(name), count)]
            if not untold:
                return
            if deadline.expired():
                raise DeadlineExceeded(
                    f"{len(untold)} topics, {untold[0]!r} for one, have partitions whose leader no broker names.",
                    hint="Do enough brokers run? `echoswarm doctor` says.",
                )
            time.sleep(_ASK_AGAIN_S)

    def _configs(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Each topic's own settings, without defaults of the cluster."""
        resources = [ConfigResource(ResourceType.TOPIC, name) for name in names]
        if not resources:
            return {}
        answers = self._admin.describe_configs(resources, request_timeout=_TIMEOUT_S)
        configs = {}
        for resource, future in answers.items():
            entries = self._ask(future.result)
            configs[resource.name] = {entry.name: entry.value for entry in entries.values() if not entry.is_default}
        return configs

    def _topics(self) -> dict[str, Any]:
        """The metadata of every topic of the cluster, by name."""
        topics: dict[str, Any] = self._ask(lambda: self._admin.list_topics(timeout=_TIMEOUT_S)).topics
        return topics

    def _done(self, futures: dict[Any, Future[None]]) -> None:
        for future in futures.values():
            self._ask(future.result)

    def _ask(self, question: Any) -> Any:
        with translated("the cluster"):
            return question()


def _is_led(topic: Any, count: int) -> bool:
    """Whether a topic of the metadata has at least `count` partitions, each with a leader."""
    return topic is not None and len(topic.partitions) >= count and all(part.leader >= 0 for part in topic.partitions.values())


def _new_topic(name: str, spec: TopicSpec) -> NewTopic:
    return NewTopic(name, num_partitions=spec.partitions, replication_factor=spec.replication_factor, config=dict(spec.config))
