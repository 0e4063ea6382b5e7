"""Topics as code: what is, what should be, and the steps between them. Pure; `topic_admin` asks and acts.

Apply is idempotent. It never shrinks a topic, and grows a keyed one only by force, since keys would move. Settings that the files do
not name are left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from echo_schemas.topic_files import TopicSpec


class Kind(StrEnum):
    """What a step does."""

    CREATE = "create"
    GROW = "grow"
    SETTING = "setting"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Actual:
    """A topic as the cluster has it. `config`: its own settings, defaults left out."""

    partitions: int
    replication_factor: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One difference. A refused step is reported and never done: somebody must decide."""

    topic: str
    kind: Kind
    what: str
    before: str = ""
    after: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All steps, topic by topic. `specs` by physical name: what the steps lead to."""

    steps: tuple[Step, ...]
    specs: Mapping[str, TopicSpec] = field(repr=False)

    @property
    def is_empty(self) -> bool:
        """Whether the cluster is as the files say."""
        return not self.steps

    @property
    def refused(self) -> tuple[Step, ...]:
        """Steps that nobody will do."""
        return tuple(step for step in self.steps if step.kind is Kind.REFUSED)


def make_plan(wanted: Mapping[str, TopicSpec], actual: Mapping[str, Actual], *, num_brokers: int, force: bool = False) -> Plan:
    """The steps from `actual` to `wanted`, both by physical name. `force` lets keyed topics grow."""
    specs = {name: spec.fitted_to(num_brokers) for name, spec in wanted.items()}
    steps: list[Step] = []
    for name, spec in specs.items():
        found = actual.get(name)
        steps += [_creation(name, spec)] if found is None else _differences(name, spec, found, force=force)
    return Plan(steps=tuple(steps), specs=specs)


def _creation(name: str, spec: TopicSpec) -> Step:
    after = f"{spec.partitions} partitions, {spec.replication_factor} replicas, {_settings(spec.config)}"
    return Step(topic=name, kind=Kind.CREATE, what="topic", after=after)


def _differences(name: str, spec: TopicSpec, found: Actual, *, force: bool) -> Iterable[Step]:
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
        if before != value:
            yield Step(topic=name, kind=Kind.SETTING, what=key, before=before or "default", after=value)


def _resize(name: str, spec: TopicSpec, found: Actual, *, force: bool) -> Step:
    why = ""
    if found.partitions > spec.partitions:
        why = "Kafka cannot remove partitions; raise the number in the topic file, or make the topic anew"
    elif spec.keyed and not force:
        why = "new partitions move keys, and running readers would refuse the moved ones; stop the run and use --force"
    kind = Kind.REFUSED if why else Kind.GROW
    return Step(topic=name, kind=kind, what="partitions", before=str(found.partitions), after=str(spec.partitions), why=why)


def _settings(config: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={value}" for key, value in sorted(config.items()))


def summarise(plan: Plan, kinds: Sequence[Kind] = tuple(Kind)) -> dict[str, int]:
    """Number of steps by kind, those that occur."""
    counts = {kind.value: sum(step.kind is kind for step in plan.steps) for kind in kinds}
    return {kind: count for kind, count in counts.items() if count}
