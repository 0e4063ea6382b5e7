"""Example records as JSON files, one folder per topic: what a message looks like, and the fixtures of the compatibility tests."""

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
    examples: dict[str, Record] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        content = json.loads(file.read_text(encoding="utf-8"))
        cls = _BY_NAME.get(content["record"])
        if cls is None or cls not in topic.records:
            raise SchemaFileError(f"examples/{topic.name}/{file.name} is a {content['record']}, which is not published on {topic.name}.")
        examples[file.name] = converter_of(cls).from_plain(_from_json(content["fields"]))
    return examples


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
