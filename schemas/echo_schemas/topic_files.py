"""Topics as reviewable documents: reads `topics/<name>.yaml` as frozen specifications, derives dead-letter topics, refuses errors."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from echo_schemas.errors import SchemaFileError
from echo_schemas.naming import DEAD_LETTER_SUFFIX
from echo_schemas.topics import BY_NAME, Topic

MS_PER_HOUR = 3_600_000
# Dead letters are rare and read by people, days later: one partition, a month.
DEAD_LETTER_RETENTION_HOURS = 720
DEAD_LETTER_BYTES = 1 << 30
# The learner reads the requests that no worker accepts: it closes their seqs.
_DEAD_LETTER_READERS = {"requests": ("learner",)}
_FILE_KEYS = {"name", "purpose", "owner", "producers", "consumers", "records", "key", "compatibility", "partitions"} | {
    "replication_factor", "min_insync_replicas", "cleanup", "retention", "settings", "dead_letters", "examples",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """The specification of one topic. `name` is logical; `config` holds Kafka's topic settings, all as text."""

    name: str
    purpose: str
    owner: str
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    records: tuple[str, ...]
    key: str
    compatibility: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str] = field(hash=False)
    dead_letters: bool
    examples: str = ""

    @property
    def topic(self) -> Topic | None:
        """The topic in code; None for a dead-letter topic."""
        return BY_NAME.get(self.name)

    @property
    def keyed(self) -> bool:
        """Whether more partitions would move keys: such a topic grows only if forced."""
        topic = self.topic
        return topic is not None and topic.key is not None and not topic.placed

    def fitted_to(self, replicas: int) -> TopicSpec:
        """The same topic with so many replicas. Of two or more one may be away, so at most `replicas` - 1 must acknowledge a record."""
        if replicas == self.replication_factor:
            return self
        config = dict(self.config)
        config["min.insync.replicas"] = str(max(1, min(int(config["min.insync.replicas"]), replicas - 1)))
        return dataclasses.replace(self, replication_factor=replicas, config=config)


@functools.cache
def load_topic_specs() -> tuple[TopicSpec, ...]:
    """Every topic in the order of `topics.TOPICS`, then the dead-letter topics. Raises SchemaFileError for an invalid file."""
    folder = resources.files("echo_schemas") / "topics"
    found: dict[str, TopicSpec] = {}
    for file in folder.iterdir():
        if file.name.endswith(".yaml"):
            spec = parse_topic_file(file.name, read_yaml(file.read_text(encoding="utf-8")))
            found[spec.name] = spec
    if missing := [name for name in BY_NAME if name not in found]:
        raise SchemaFileError(f"No topic file for {', '.join(missing)}.", hint="Add topics/<name>.yaml.")
    ordered = tuple(found[name] for name in BY_NAME)
    return ordered + tuple(_dead_letters_of(spec) for spec in ordered if spec.dead_letters)


def read_yaml(text: str) -> Any:
    """A document's content."""
    # Imported only here: most commands read no such file, and its expressions take a while to compile.
    import yaml

    return yaml.safe_load(text)


def parse_topic_file(file_name: str, content: Any) -> TopicSpec:
    """One file's content as a specification. Editors and tests check the same with the meta-schema `topic.schema.json`."""
    if not isinstance(content, dict):
        raise SchemaFileError(f"topics/{file_name} is not a mapping.")
    if unknown := set(content) - _FILE_KEYS:
        raise SchemaFileError(f"topics/{file_name} has unknown keys: {', '.join(sorted(unknown))}.")
    if absent := _FILE_KEYS - {"retention", "settings"} - set(content):
        raise SchemaFileError(f"topics/{file_name} lacks {', '.join(sorted(absent))}.")
    name = content["name"]
    if file_name != f"{name}.yaml":
        raise SchemaFileError(f"topics/{file_name} describes {name!r}; name the file after the topic.")
    topic = BY_NAME.get(name)
    if topic is None:
        raise SchemaFileError(f"topics/{file_name} describes {name!r}, which no code knows.")
    records = tuple(content["records"])
    if records != tuple(record.__name__ for record in topic.records):
        raise SchemaFileError(f"topics/{file_name} names the records {records}; the code publishes {[r.__name__ for r in topic.records]}.")
    if topic.compacted != (content["cleanup"] == "compact"):
        raise SchemaFileError(f"topics/{file_name} says cleanup {content['cleanup']!r}, but in the code compacted is {topic.compacted}.")
    if (content["cleanup"] == "delete") != ("retention" in content):
        raise SchemaFileError(f"topics/{file_name}: a topic that is deleted states its retention in hours and bytes, a compacted one none.")
    names = {each.name for each in dataclasses.fields(TopicSpec)}
    own: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items() if key in names}
    return TopicSpec(**own, config=_config_of(content))


def _config_of(content: Mapping[str, Any]) -> dict[str, str]:
    config = {"cleanup.policy": content["cleanup"], "min.insync.replicas": str(content["min_insync_replicas"])}
    if retention := content.get("retention"):
        hours = retention["hours"]
        config["retention.ms"] = "-1" if hours < 0 else str(hours * MS_PER_HOUR)
        config["retention.bytes"] = str(retention["bytes_per_partition"])
    return config | {str(key): str(value) for key, value in content.get("settings", {}).items()}


def _dead_letters_of(spec: TopicSpec) -> TopicSpec:
    """The dead-letter topic of `spec`: its readers write it; operators read it and may redrive its letters."""
    return TopicSpec(
        name=f"{spec.name}{DEAD_LETTER_SUFFIX}",
        purpose=f"Messages of {spec.name} that could not be read, with their original bytes, key and headers.",
        owner=spec.owner,
        # Redriving reads dead letters and writes none.
        producers=tuple(role for role in spec.consumers if role != "redrive"),
        consumers=("operator", "redrive", *_DEAD_LETTER_READERS.get(spec.name, ())),
        records=(),
        key="the original key",
        compatibility="NONE",
        partitions=1,
        replication_factor=spec.replication_factor,
        config={
            "cleanup.policy": "delete",
            "min.insync.replicas": spec.config["min.insync.replicas"],
            "retention.ms": str(DEAD_LETTER_RETENTION_HOURS * MS_PER_HOUR),
            "retention.bytes": str(DEAD_LETTER_BYTES),
        },
        dead_letters=False,
    )
