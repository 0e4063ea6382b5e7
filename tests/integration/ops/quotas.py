"""Client quotas, set as `kafka-configs.sh --alter --entity-type clients` does: confluent-kafka has no call for it."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Any

from aiokafka.conn import create_conn
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Boolean, Float64, Int16, Int32, Schema, String

_TEXT = String("utf-8")
_ENTITY = Array(("entity_type", _TEXT), ("entity_name", _TEXT))


class _Altered(Response):  # type: ignore[misc]  # aiokafka is not typed
    API_KEY = 49
    API_VERSION = 0
    SCHEMA = Schema(("throttle_time_ms", Int32), ("entries", Array(("error_code", Int16), ("error_message", _TEXT), ("entity", _ENTITY))))


class _Alter(RequestStruct):  # type: ignore[misc]  # see above
    API_KEY = 49
    API_VERSION = 0
    RESPONSE_TYPE = _Altered
    SCHEMA = Schema(
        ("entries", Array(("entity", _ENTITY), ("ops", Array(("key", _TEXT), ("value", Float64), ("remove", Boolean))))),
        ("validate_only", Boolean),
    )


class _AlterClientQuotas(Request[_Alter]):  # type: ignore[misc]  # see above
    """KIP-546."""

    API_KEY = 49

    def __init__(self, entity: tuple[str, str | None], bytes_a_second: dict[str, float]) -> None:
        self._entry = ([entity], [(key, value, False) for key, value in bytes_a_second.items()])

    def build(self, request_struct_class: type[_Alter]) -> _Alter:
        return request_struct_class([self._entry], False)


def set_quota(bootstrap: str, client_id: str, **bytes_a_second: float) -> None:
    """`producer_byte_rate`, `consumer_byte_rate` of a client id, on an open cluster."""
    asyncio.run(_set(bootstrap, ("client-id", client_id), bytes_a_second, {}))


def set_quota_of_users(bootstrap: str, login: Mapping[str, str], **bytes_a_second: float) -> None:
    """Of every user that has none of its own, each for itself, on a secured cluster. `login`: the administrator's client properties."""
    context = ssl.create_default_context(cafile=login["ssl.ca.location"])
    context.check_hostname = login.get("ssl.endpoint.identification.algorithm") != "none"
    access = {
        "security_protocol": login["security.protocol"],
        "ssl_context": context,
        "sasl_mechanism": login.get("sasl.mechanism") or login["sasl.mechanisms"],
        "sasl_plain_username": login["sasl.username"],
        "sasl_plain_password": login["sasl.password"],
    }
    asyncio.run(_set(bootstrap, ("user", None), bytes_a_second, access))


async def _set(bootstrap: str, entity: tuple[str, str | None], bytes_a_second: dict[str, float], access: Mapping[str, Any]) -> None:
    host, port = bootstrap.split(",")[0].split(":")
    connection: Any = await create_conn(host, int(port), **access)
    try:
        answer = await connection.send(_AlterClientQuotas(entity, bytes_a_second))
        assert [entry[0] for entry in answer.entries] == [0], answer
    finally:
        await connection.close()
