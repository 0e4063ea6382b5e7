"""Where a snapshot's bytes go: through the log or into a store, by [weights] source and [store] above_mb; and whether they fit there.

A snapshot that would not fit is refused before anything is written: at the start by the size of the base model, and before each checkpoint
whose snapshot is larger than any before.
"""

from __future__ import annotations

import json
import logging
import math
import struct
from contextlib import suppress
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import ConfigResource, ResourceType

from echo_bus.bus import Bus
from echo_bus.client.kafka_errors import translate
from echo_bus.errors import NotAuthorized
from echo_core.needs.memory import ITEM_BYTES
from echo_learner.commit.store import SnapshotStore
from echo_schemas.errors import UserError
from echo_schemas.topics import WEIGHT_CHUNKS
from echo_settings import Settings
from echo_settings.rules import store_from_bytes
from echo_tasks.base_models import resolve_base

logger = logging.getLogger(__name__)

_GIB = 1 << 30
# While a snapshot is written the one before must stay readable, and both may lie on one partition.
_KEPT_AT_ONCE = 2
_ASK_S = 30.0
_HEADER_LENGTH = struct.Struct("<Q")


class SnapshotPlacement:
    """Chooses for each snapshot by its size. Not thread-safe but for `store_for`."""

    def __init__(self, bus: Bus, settings: Settings) -> None:
        """Raises UserError if no driver for the address in [store] uri is installed."""
        self._bus = bus
        self._above_bytes = store_from_bytes(settings)
        self._is_own_folder = not settings.store.uri
        uri = settings.store.uri or (Path(settings.checkpoint.folder).absolute() / "snapshots").as_uri()
        self.lists_chunks = settings.weights.may_pass_on
        """Whether every manifest must come with the checksums of its chunks."""
        self._store = SnapshotStore(
            uri, settings.run.name, keep=settings.store.keep or (settings.checkpoint.keep if self._is_own_folder else 0)
        )
        self._checked_bytes = -1

    def store_for(self, num_bytes: int) -> SnapshotStore | None:
        """The store that takes a snapshot of `num_bytes`; None: the log does."""
        return self._store if num_bytes >= self._above_bytes else None

    def check(self, num_bytes: int) -> None:
        """Raise UserError unless a snapshot of `num_bytes` can be written where it would go; TransportError. Changes nothing."""
        if num_bytes <= self._checked_bytes:
            return
        store = self.store_for(num_bytes)
        if store is None:
            self._check_log(num_bytes)
        else:
            store.check(num_bytes)
            if self._is_own_folder and self._checked_bytes < self._above_bytes:
                logger.warning(
                    "Snapshots of %.1f GiB lie in %s, where only workers of this machine can read them. For others set [store] uri to an "
                    "address that all of them reach.",
                    num_bytes / _GIB,
                    store.uri,
                )
        self._checked_bytes = num_bytes

    def _check_log(self, num_bytes: int) -> None:
        """Raise UserError unless retention keeps the snapshot beside the one before it, which workers may still install."""
        if not num_bytes:
            return
        name = self._bus.namespace.topic(WEIGHT_CHUNKS)
        resource = ConfigResource(ResourceType.TOPIC, name)
        # In a variable: garbage collection of the admin client would cancel its request.
        admin = self._bus.cluster.admin()
        try:
            found = admin.describe_configs([resource], request_timeout=_ASK_S)[resource].result()
        except KafkaException as exc:
            error = translate(exc, name)
            if not isinstance(error, NotAuthorized):
                raise error from exc
            logger.warning("The retention of %s is not known: this login has no DescribeConfigs on it (see `echoswarm acls render`).", name)
            return
        kept = int(found["retention.bytes"].value) if "retention.bytes" in found else -1
        if 0 <= kept < num_bytes * _KEPT_AT_ONCE:
            raise UserError(
                f"{name} keeps {kept / _GIB:,.1f} GiB a partition, and a snapshot of {num_bytes / _GIB:,.1f} GiB needs "
                f"{num_bytes * _KEPT_AT_ONCE / _GIB:,.1f}: workers must still get it while the next one is written. Nothing was changed.",
                hint=f"Lower [store] above_mb, so that it goes into the store, or raise retention.bytes of {name}.",
            )


def expected_bytes(settings: Settings) -> int:
    """About the size of the run's snapshots: the base model in the run's precision; 0 for adapters, which are small."""
    if settings.policy.update != "full":
        return 0
    return sum(map(_num_elements, resolve_base(settings.policy.base).glob("*.safetensors"))) * ITEM_BYTES[settings.policy.dtype]


def _num_elements(path: Path) -> int:
    """Number of elements in a safetensors file, by its header; 0 without a valid header, which the trainer reports."""
    with suppress(OSError, ValueError, struct.error, KeyError, TypeError), path.open("rb") as file:
        (length,) = _HEADER_LENGTH.unpack(file.read(_HEADER_LENGTH.size))
        header = json.loads(file.read(length))
        return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return 0
