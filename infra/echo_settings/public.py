"""The part of a configuration that may be published: in the topic `runs`, in reports, in logs. It lists the allowed values. Pure.

All keys of our own sections are published, except [registry] password and [weights] secret; addresses with a user and password are refused
when the file is read. Of tables with foreign keys ([kafka.client], the engines' options), numbers, booleans, and texts under the names
below are published. [task.options], [learner.loss_options] and the options of [[eval]] describe the training and are published whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo_settings.sections import Settings

HIDDEN = "(not shown)"
"""Replaces a value that is not published."""
_CLIENT = frozenset(
    {
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.kerberos.service.name",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.token.endpoint.url",
        "https.ca.location",
        "ssl.ca.location",
        "ssl.certificate.location",
        "ssl.key.location",
        "ssl.endpoint.identification.algorithm",
        "broker.address.family",
        "client.dns.lookup",
        "client.rack",
        "compression.codec",
        "compression.type",
        "group.protocol",
        "debug",
    }
)
_ENGINE = frozenset(
    {
        "adapter_folder",
        "api_key_env",
        "api_key_file",
        "attention_backend",
        "ca_file",
        "compilation_config",
        "device",
        "distributed_executor_backend",
        "dtype",
        "kv_cache_dtype",
        "load_format",
        "mode",
        "model",
        "quantization",
        "server_folder",
        "url",
        "weights",
    }
)


def public_config(settings: Settings) -> dict[str, Any]:
    """The settings as plain data, with hidden values replaced."""
    content = settings.model_dump(mode="json", exclude={"registry": {"password"}, "weights": {"secret"}})
    content["kafka"]["client"] = _listed(settings.kafka.client, _CLIENT)
    rollout = content["rollout"]
    for each in (rollout, *rollout["pool"]):
        each["options"] = _listed(each["options"], _ENGINE)
    return content


def _listed(table: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {key: value if _is_number(value) or (key in names and not _has_login(value)) else HIDDEN for key, value in table.items()}


def _has_login(value: Any) -> bool:
    """Whether a text may be an address with a user and a password."""
    return "://" in str(value) and "@" in str(value)


def _is_number(value: Any) -> bool:
    """Whether a value consists of numbers and booleans alone."""
    if isinstance(value, list):
        return all(_is_number(each) for each in value)
    return value is None or isinstance(value, int | float)
