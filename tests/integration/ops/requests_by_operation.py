"""For each operation that Kafka's authorizer knows, a request that takes it: sent as it is, over one connection of one user.

A client library looks before it asks, so that much of what is forbidden would never be asked of the broker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from aiokafka.conn import create_conn
from aiokafka.protocol import admin, commit, coordination, fetch, offset, produce, transaction
from aiokafka.protocol.types import Array, Schema
from aiokafka.record.default_records import DefaultRecordBatchBuilder

from echo_bus.clock import SystemClock
from echo_streams.security import login_of

_WAIT_MS = 10_000
_TRANSACTION = 1
_TOPIC = 2
_ANY, _ALLOW, _LITERAL = 1, 3, 3
# The error codes of the protocol that say no, by what they say it of.
REFUSALS = {"topic": 29, "group": 30, "cluster": 31, "transactional-id": 53}


@dataclass(frozen=True, slots=True)
class Cell:
    """One user's attempt: `operation` on `name`, by the request `by` (an operation is needed by several)."""

    resource: str
    name: str
    operation: str
    by: str
    request: Any


def cells_of(topics: Sequence[str], groups: Sequence[str], transactional_ids: Sequence[str]) -> Iterator[Cell]:
    """Every operation on every resource. None does harm if it is wrongly allowed."""
    for name in topics:
        yield Cell("topic", name, "Write", "Produce", produce.ProduceRequest(None, -1, _WAIT_MS, [(name, [(0, _batch())])]))
        yield Cell("topic", name, "Read", "Fetch", fetch.FetchRequest(0, 0, 1_000, 0, [(name, [(0, 0, 1_000)])]))
        yield Cell("topic", name, "Describe", "ListOffsets", offset.OffsetRequest(-1, 0, [(name, [(0, -1)])]))
        yield Cell("topic", name, "DescribeConfigs", "DescribeConfigs", admin.DescribeConfigsRequest([(_TOPIC, name, None)]))
        changed = [(_TOPIC, name, [("retention.ms", "60000")])]
        yield Cell("topic", name, "AlterConfigs", "AlterConfigs", admin.AlterConfigsRequest(changed, validate_only=True))
        grown = admin.CreatePartitionsRequest([(name, (64, None))], _WAIT_MS, True)
        yield Cell("topic", name, "Alter", "CreatePartitions", grown)
        yield Cell("topic", name, "Delete", "DeleteRecords", admin.DeleteRecordsRequest([(name, [(0, 0)])], _WAIT_MS))
        yield Cell("topic", f"{name}.new", "Create", "CreateTopics", _new_topic(f"{name}.new"))
        yield Cell("topic", f"{name}.none", "Delete", "DeleteTopics", admin.DeleteTopicsRequest([f"{name}.none"], _WAIT_MS))
    for name in groups:
        committed = commit.OffsetCommitRequest(name, -1, "", -1, [(topics[0], [(0, 0, "")])])
        yield Cell("group", name, "Read", "OffsetCommit", committed)
        yield Cell("group", name, "Describe", "OffsetFetch", commit.OffsetFetchRequest(name, [(topics[0], [0])]))
        yield Cell("group", name, "Delete", "DeleteGroups", admin.DeleteGroupsRequest([f"{name}.none"]))
    for name in transactional_ids:
        yield Cell("transactional-id", name, "Write", "InitProducerId", transaction.InitProducerIdRequest(name, _WAIT_MS))
        found = coordination.FindCoordinatorRequest(name, _TRANSACTION)
        yield Cell("transactional-id", name, "Describe", "FindCoordinator", found)
    everything = (_ANY, None, _ANY, None, None, _ANY, _ANY)
    yield Cell("cluster", "", "Describe", "DescribeAcls", admin.DescribeAclsRequest(*everything))
    entry = (_TOPIC, "somebody.elses", _LITERAL, "User:nobody", "*", _ALLOW, _ALLOW)
    yield Cell("cluster", "", "Alter", "CreateAcls", admin.CreateAclsRequest(*entry))
    yield Cell("cluster", "", "Alter", "DeleteAcls", admin.DeleteAclsRequest(*entry))
    yield Cell("cluster", "", "DescribeConfigs", "DescribeClientQuotas", admin.DescribeClientQuotasRequest([], False))


def refused(bootstrap: str, login: dict[str, str], cells: Sequence[Cell]) -> list[bool]:
    """Whether the broker refuses each of them to the user of `login`."""
    return asyncio.run(_refused(bootstrap, login, cells))


async def _refused(bootstrap: str, login: dict[str, str], cells: Sequence[Cell]) -> list[bool]:
    host, port = bootstrap.split(":")
    found = login_of(login)
    connection = await create_conn(
        host,
        int(port),
        ssl_context=found.context,
        security_protocol="SASL_SSL",
        sasl_mechanism=found.mechanism,
        sasl_plain_username=found.username,
        sasl_plain_password=found.password,
    )
    try:
        # One after the other: a fetch that waits holds back what was sent after it, and its answer is then late, not wrong.
        return [REFUSALS[cell.resource] in await _asked(connection, cell.request) for cell in cells]
    finally:
        await connection.close()


async def _asked(connection: Any, request: Any) -> set[int]:
    """The error codes of the answer to a request."""
    answer = await connection.send(request)
    return set(_codes(answer.SCHEMA, [answer.get_item(name) for name in answer.SCHEMA.names]))


def _codes(schema: Any, values: Iterable[Any]) -> Iterator[int]:
    """Every error code in an answer, however deep."""
    for name, kind, value in zip(schema.names, schema.fields, values, strict=True):
        if name == "error_code":
            yield value
        elif isinstance(kind, Array) and isinstance(kind.array_of, Schema):
            for each in value or ():
                yield from _codes(kind.array_of, each)


def _batch() -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, False, -1, -1, -1, 1_000)
    builder.append(0, SystemClock().time_ms(), b"k", b"v", [])
    return bytes(builder.build())


def _new_topic(name: str) -> Any:
    return admin.CreateTopicsRequest([(name, 1, 1, [], [])], _WAIT_MS, True)
