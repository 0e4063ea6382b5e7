"""Topics as code: the topics of the cluster, those of the files, and the steps between them. Pure; `topic_admin` asks the cluster and acts.

Apply is idempotent. It never shrinks a topic. It grows a keyed topic only with --force, since keys would move, and lowers durability only
with --force and --reason. Settings that the files do not name stay.

The number of replicas of a namespace is fixed when it is made, and its topics are the record of it. A broker that is down later does not
change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from echo_schemas.errors import UserError
from echo_schemas.topic_files import TopicSpec

# The number of replicas that must have a record before it is acknowledged.
_DURABILITY = "min.insync.replicas"


class Kind(StrEnum):
    """What a step does."""

    CREATE = "create"
    GROW = "grow"
    SETTING = "setting"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingTopic:
    """A topic of the cluster. `config`: its own settings, without defaults."""

    partitions: int
    replication_factor: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One difference. A refused step is reported and never done: the operator must decide."""

    topic: str
    kind: Kind
    what: str
    before: str = ""
    after: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All steps, topic by topic. `specs`: the wanted topics by physical name."""

    steps: tuple[Step, ...]
    specs: Mapping[str, TopicSpec] = field(repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether the cluster is as the files say."""
        return not self.steps

    def only(self, *kinds: Kind) -> Plan:
        """The steps of these kinds alone."""
        return Plan(steps=tuple(step for step in self.steps if step.kind in kinds), specs=self.specs)

    @property
    def unmakeable(self) -> tuple[Step, ...]:
        """Missing topics that cannot be made now."""
        return tuple(step for step in self.refused if step.before == "missing")

    @property
    def refused(self) -> tuple[Step, ...]:
        """Steps that `apply` will not do."""
        return tuple(step for step in self.steps if step.kind is Kind.REFUSED)


def choose_replicas(
    wanted: Mapping[str, TopicSpec], actual: Mapping[str, ExistingTopic], *, num_brokers: int, num_addresses: int, asked: int | None
) -> int:
    """The number of replicas of a namespace's topics: `asked` ([kafka] replicas), else that of the existing topics. A new namespace gets
    that of the files, or 1 on a cluster of one broker. `num_addresses`: how many brokers [kafka] bootstrap names.

    Raises UserError for a new namespace if fewer brokers answer than the files need, unless `asked` is set.
    """
    if asked is not None:
        return asked
    if actual:
        return max(found.replication_factor for found in actual.values())
    most = max(spec.replication_factor for spec in wanted.values())
    if num_brokers >= most:
        return most
    if num_brokers == 1 and num_addresses == 1:
        return 1
    raise UserError(
        f"{num_brokers} brokers answer, and the topics want {most} replicas. The number is fixed when a namespace is made, so one that "
        "is made while a broker is down would have too few for good.",
        hint=f"Start the missing brokers. If there are no more, say so: [kafka] replicas = {num_brokers}.",
    )


def make_plan(
    wanted: Mapping[str, TopicSpec],
    actual: Mapping[str, ExistingTopic],
    *,
    replicas: int,
    num_brokers: int,
    force: bool = False,
    lowers: bool = False,
) -> Plan:
    """The steps from `actual` to `wanted`, both by physical name. `force` lets keyed topics grow, `lowers` lets durability go down."""
    specs = {name: spec.fitted_to(replicas) for name, spec in wanted.items()}
    steps: list[Step] = []
    for name, spec in specs.items():
        found = actual.get(name)
        if found is None:
            steps.append(_creation(name, spec, num_brokers))
        else:
            steps += _differences(name, spec, found, force=force, lowers=lowers)
    return Plan(steps=tuple(steps), specs=specs)


def _creation(name: str, spec: TopicSpec, num_brokers: int) -> Step:
    after = f"{spec.partitions} partitions, {spec.replication_factor} replicas, {_settings(spec.config)}"
    if spec.replication_factor > num_brokers:
        why = f"a topic cannot have more replicas than brokers, and {num_brokers} answer; start the others"
        return Step(topic=name, kind=Kind.REFUSED, what="topic", before="missing", after=after, why=why)
    return Step(topic=name, kind=Kind.CREATE, what="topic", after=after)


def _differences(name: str, spec: TopicSpec, found: ExistingTopic, *, force: bool, lowers: bool) -> Iterable[Step]:
    if found.partitions != spec.partitions:
        yield _resize(name, spec, found, force=force)
    if found.replication_factor != spec.replication_factor:
        yield Step(
            topic=name,
            kind=Kind.REFUSED,
            what="replicas",
            before=str(found.replication_factor),
            after=str(spec.replication_factor),
            why="moving replicas is a task for the cluster's operators (kafka-reassign-partitions)",
        )
    for key, value in sorted(spec.config.items()):
        before = found.config.get(key)
        if before == value:
            continue
        why = ""
        if key == _DURABILITY and before is not None and int(before) > int(value) and not lowers:
            why = "fewer replicas would have to have a record before it counts; `topics apply --force --reason TEXT` lowers it"
        kind = Kind.REFUSED if why else Kind.SETTING
        yield Step(topic=name, kind=kind, what=key, before=before or "default", after=value, why=why)


def _resize(name: str, spec: TopicSpec, found: ExistingTopic, *, force: bool) -> Step:
    why = ""
    if found.partitions > spec.partitions:
        why = "Kafka cannot remove partitions; raise the number in the topic file, or make the topic anew"
    elif spec.keyed and not force:
        why = "new partitions move keys, and running readers would refuse the moved ones; stop the run and use --force"
    kind = Kind.REFUSED if why else Kind.GROW
    return Step(topic=name, kind=kind, what="partitions", before=str(found.partitions), after=str(spec.partitions), why=why)


def _settings(config: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(config.items()))


def summarise(plan: Plan) -> dict[str, int]:
    """Number of steps by kind, without zeros."""
    counts = {kind.value: sum(step.kind is kind for step in plan.steps) for kind in Kind}
    return {kind: count for kind, count in counts.items() if count}
