"""Reads the example records of `echo_schemas/examples`: JSON files, one folder per topic."""

from __future__ import annotations

import base64
import json
from importlib import resources
from typing import Any

from echo_schemas.converters import converter_of
from echo_schemas.errors import SchemaFileError
from echo_schemas.records import RECORDS, Record
from echo_schemas.topics import Topic

_BY_NAME = {record.__name__: record for record in RECORDS}
# Byte columns are written as {"base64": "…"}: JSON has no bytes.
_BYTES_KEY = "base64"


def load_examples(topic: Topic) -> dict[str, Record]:
    """File name → record, for every example of a topic. Raises SchemaFileError for a file that is not a record of this topic."""
    folder = resources.files("echo_schemas") / "examples" / topic.name
    files = sorted(folder.iterdir(), key=lambda entry: entry.name)
    return {file.name: parse_example(topic, file.name, json.loads(file.read_text(encoding="utf-8"))) for file in files}


def parse_example(topic: Topic, file_name: str, content: Any) -> Record:
    """One example file's content, `{"record": …, "fields": …}`, as a record. Raises SchemaFileError unless it fits field by field."""
    name = content.get("record")
    cls = _BY_NAME.get(name)
    if cls is None or cls not in topic.records:
        raise SchemaFileError(f"examples/{topic.name}/{file_name} is a {name}, which is not published on {topic.name}.")
    try:
        record: Record = converter_of(cls).from_plain(_from_json(content["fields"]))
    except (KeyError, TypeError, ValueError) as exc:
        raise SchemaFileError(f"examples/{topic.name}/{file_name} is not a whole {name}: {exc!r}.") from exc
    if to_json(record) != content:
        raise SchemaFileError(
            f"examples/{topic.name}/{file_name} has fields that a {name} has not.", hint="A field was renamed, removed or mistyped."
        )
    return record


def to_json(record: Record) -> dict[str, Any]:
    """`record` in the form of an example file."""
    fields: dict[str, Any] = _to_json(converter_of(type(record)).to_plain(record))
    return {"record": type(record).__name__, "fields": fields}


def _to_json(node: Any) -> Any:
    if isinstance(node, bytes):
        return {_BYTES_KEY: base64.b64encode(node).decode("ascii")}
    if isinstance(node, dict):
        return {key: _to_json(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_to_json(item) for item in node]
    return node


def _from_json(node: Any) -> Any:
    if isinstance(node, dict):
        if set(node) == {_BYTES_KEY}:
            return base64.b64decode(node[_BYTES_KEY])
        return {key: _from_json(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_from_json(item) for item in node]
    return node
